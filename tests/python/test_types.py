"""Tests that the package passes mypy in strict mode, that its stubs have the names of the extension, and that pyright
knows a wrapped optimizer in the programs of its users. test_keywords.py does the same with mypy."""

import ast
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import ballast
import pytest
from ballast import _core
from python.conftest import PACKAGE
from python.test_keywords import TYPED, lines_with_errors

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mypy", reason="mypy is not installed: .ci/bootstrap venv")


def check(command: list[str], environment: dict[str, str], cache: Path) -> None:
    environment = {**environment, "MYPY_CACHE_DIR": str(cache)}
    ended = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_package_is_typed(environment, tmp_path):
    check(["mypy", "--strict", "--config-file", "pyproject.toml", str(PACKAGE / "ballast")], environment, tmp_path)


@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed: .ci/bootstrap venv frameworks")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: .ci/bootstrap venv torch")
def test_pyright_knows_a_wrapped_optimizer_and_the_examples(environment, tmp_path):
    for program in [*TYPED.glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        shutil.copy(program, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(PACKAGE)], "typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if not ended.stdout.startswith("{"):
        pytest.skip(f"pyright does not start: {ended.stderr.strip()[-200:]}")  # it fetches a part of itself when it first runs
    diagnostics = json.loads(ended.stdout)["generalDiagnostics"]
    errors = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in diagnostics}
    assert errors == lines_with_errors(), ended.stdout


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: .ci/bootstrap venv torch")
def test_each_class_of_torch_that_can_be_wrapped_has_a_type():
    import torch
    from ballast.torch import typing as wrapped_types
    from ballast.torch.updates.rules import updates_of

    trained = [torch.nn.Parameter(torch.ones(1, 1))]
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            try:
                updates_of(kind(trained), declared=False, stored=False)
            except ballast.Error:
                continue  # it is refused
            assert issubclass(getattr(wrapped_types, f"Wrapped{name}"), (kind, ballast.WrappedOptimizer)), name
    assert "max_grad_norm" in signature(ballast.wrap).parameters


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def names_of(statements: list[ast.stmt]) -> set[str]:
    found = [getattr(s, "name", None) or getattr(getattr(s, "target", None), "id", "_") for s in statements]
    assigned = [target.id for s in statements if isinstance(s, ast.Assign) for target in s.targets]
    return public([*found, *assigned])


def test_the_stubs_have_the_names_of_the_extension():
    stub = ast.parse((PACKAGE / "ballast/_core.pyi").read_text()).body
    only_types = {s.name for s in stub if isinstance(s, ast.ClassDef) and "TypedDict" in map(ast.unparse, s.bases)}
    assert names_of(stub) - only_types == public(vars(_core))
    classes = {s.name: s for s in stub if isinstance(s, ast.ClassDef) and s.name not in only_types}
    for name, statement in classes.items():
        if not name.startswith("_"):  # the bases are types of the stub only
            bodies = [statement.body, *(classes[base].body for base in map(ast.unparse, statement.bases) if base in classes)]
            assert set().union(*map(names_of, bodies)) == public(vars(getattr(_core, name))), name
