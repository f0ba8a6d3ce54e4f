"""check_distribution.py FILE: a source distribution holds the files of the repository; a wheel holds the package and nothing
else, and works in an environment of its own, without a compiler.

A wheel that python/portable_wheel.py has made also holds the libraries that it needs apart from the C and C++ libraries. Then
these are checked to be used, and not those of the system, and to get along with those.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "python"
BUNDLED = "ballast_train.libs/"
EXTENSION = re.compile(r"ballast/_core\.[\w.-]+\.so")
# A wheel for each version of Python: pybind11 uses more than the stable ABI.
NAME = re.compile(r"ballast_train-[\d.]+-(cp3\d+)-\1-((?:many)?linux[\w.]+)\.whl")
# What a wheel that is not repaired takes from the system: its libraries, and those of Gloo.
OF_SYSTEM = {"libfmt", "libtbb", "liburing", "libsodium", "libgloo", "libhiredis", "libibverbs", "libnl-3", "libnl-route-3"}
LIBRARIES = """
import ballast, re
assert ballast.connect(rank=0, size=1).all_reduce([1]) == [1]
mapped = {line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/lib(fmt|tbb|uring|sodium|gloo)\\b", line)}
print(*mapped, sep="\\n")
"""

# What MPI does with libibverbs, and torch with other libraries: all libraries see the symbols of the system's.
WITH_THOSE_OF_SYSTEM = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    except OSError:
        pass  # this system does not have it
"""


def is_portable(wheel: Path) -> bool:
    return "manylinux" in wheel.name


def check_name(wheel: Path) -> None:
    found = NAME.fullmatch(wheel.name)
    assert found and found[1] == f"cp3{sys.version_info.minor}", wheel.name


def check_contents(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and not name.endswith("/")]
    bundled = [name for name in names if name.startswith(BUNDLED)]
    assert bool(bundled) == is_portable(wheel), names
    assert not [name for name in bundled if "libnl" in name], bundled  # its end is that of the process, where there are two
    extensions = [name for name in names if EXTENSION.fullmatch(name)]
    assert len(extensions) == 1, names
    package = SOURCE / "ballast"
    files = [file for ending in ("*.py", "py.typed") for file in package.rglob(ending)]
    expected = {file.relative_to(SOURCE).as_posix() for file in files} | {"ballast/_core.pyi", "ballast/torch/typing.py"}
    assert set(names) - {*extensions, *bundled} == expected, names


def check_licences(wheel: Path) -> None:
    """Compare the libraries that the wheel holds with the licences in it. One is Ballast's own (python/portable_wheel.py)."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    libraries = {re.sub(r"(-[0-9a-f]{8})?\.so.*", "", Path(name).name) for name in names if name.startswith(BUNDLED)}
    licences = {Path(name).stem for name in names if ".dist-info/licenses/" in name}
    assert licences == libraries - {"libibverbs"} | {"LICENSE"}, licences


def check_libraries(wheel: Path) -> None:
    """Compare the libraries that the wheel needs with those that it may need. A new one is a decision."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    needed = {name.partition(".so")[0] for name in found["external_libs"]}
    assert needed <= (set() if is_portable(wheel) else OF_SYSTEM), needed
    print(f"{wheel.name}: symbols of {found['sym_tag']}, libraries of the system: {', '.join(sorted(needed)) or 'none'}")


def check_use(wheel: Path, folder: Path) -> None:
    """Use the wheel where there is neither a compiler nor torch."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    environment = {"HOME": str(folder), "PATH": str(programs), "LANG": os.environ.get("LANG", "C.UTF-8")}

    def run(*command: str | Path) -> str:
        return subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True).stdout

    run(programs / "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(programs / "ballast", "plan", "llama-8b", "--ranks", "4", "--gpu", "h100")
    assert f"ballast {wheel.name.split('-')[1]}" in run(programs / "ballast", "--version")
    used = run(programs / "python", "-c", LIBRARIES).split()
    of_system = [re.sub(r"-[0-9a-f]{8}(?=\.so)", "", Path(library).name) for library in used]
    run(programs / "python", "-c", WITH_THOSE_OF_SYSTEM + LIBRARIES, *of_system)
    assert used and all((BUNDLED in library) == is_portable(wheel) for library in used), used


def check_source(file: Path) -> None:
    """Compare the files with those that Git does not ignore: a build of the distribution would fail without them."""
    with tarfile.open(file) as files:
        found = {member.name.partition("/")[2] for member in files if member.isfile()}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, cwd=SOURCE.parent, stdout=subprocess.PIPE, text=True).stdout
    assert found == {"PKG-INFO", *listed.splitlines()}, found ^ {"PKG-INFO", *listed.splitlines()}


def check_wheel(wheel: Path) -> None:
    check_name(wheel)
    check_contents(wheel)
    check_licences(wheel)
    if find_spec("auditwheel"):
        check_libraries(wheel)
    else:
        print("auditwheel is not installed: the libraries are not checked")
    with tempfile.TemporaryDirectory() as folder:
        check_use(wheel, Path(folder))


distribution = Path(sys.argv[1]).resolve()
(check_source if distribution.name.endswith(".tar.gz") else check_wheel)(distribution)
print(f"{distribution.name} is as it should be")
