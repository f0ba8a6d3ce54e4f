"""Tests of the package's imports, links and files, and of the examples in its docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ballast
import pytest
from ballast import _core

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    module.name for module in pkgutil.walk_packages(ballast.__path__, "ballast.") if "__main__" not in module.name
]


@pytest.mark.parametrize("name", ["ballast", *MODULES])
def test_the_examples_are_true(name):
    if name == "ballast.models.modules":
        pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert failed == 0


def test_everything_public_is_explained_and_functions_have_an_example():
    for name in set(ballast.__all__) - {"__version__"}:
        thing = getattr(ballast, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            assert ">>>" in inspect.getdoc(thing), name


def test_the_version_has_one_place():
    stated = re.search(r"project\(ballast VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert stated and ballast.__version__ == stated[1]


def test_it_imports_without_torch_and_numpy(environment):
    script = "import sys; sys.modules.update(torch=None, numpy=None); import ballast; print(ballast.plan('gpt2').fits)"
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_importing_it_does_not_import_torch(environment):
    script = "import sys, ballast; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_the_extension_links_no_torch_and_exports_only_its_init_function():
    def readelf(*options: str) -> str:
        return subprocess.run(["readelf", "--wide", *options, _core.__file__], capture_output=True, text=True).stdout

    needed = re.findall(r"NEEDED.*\[(.*)\]", readelf("--dynamic"))
    assert needed and not [name for name in needed if "torch" in name or "c10" in name or "libcuda.so" in name]
    defined = [line.split()[7] for line in readelf("--dyn-syms").splitlines() if re.search(r"\bDEFAULT +\d+ ", line)]
    assert [name for name in defined if "ballast" in name and name != "PyInit__core"] == []


def test_the_build_has_all_files_of_the_package():
    built = {path.name for path in Path(ballast.__file__).parent.iterdir()}
    built -= {"__pycache__", Path(_core.__file__).name, "_core.pyi"}  # the build makes these
    source = {path.name for path in (ROOT / "python" / "ballast").iterdir()} - {"__pycache__"}
    assert built == source
