"""check_wheel.py WHEEL: it holds the package and nothing else, and works in an environment of its own."""

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "python"
EXTENSION = re.compile(r"ballast/_core\.[\w.-]+\.so")


def check_contents(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    extensions = [name for name in names if EXTENSION.fullmatch(name)]
    assert len(extensions) == 1, names
    package = SOURCE / "ballast"
    files = [file for ending in ("*.py", "*.pyi", "py.typed") for file in package.rglob(ending)]
    assert set(names) - set(extensions) == {file.relative_to(SOURCE).as_posix() for file in files}, names


def check_use(wheel: Path, folder: Path) -> None:
    venv.create(folder, with_pip=True)

    def run(*command: str | Path) -> None:
        subprocess.run(command, check=True, cwd=folder)

    run(folder / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(folder / "bin/ballast", "plan", "llama-8b", "--ranks", "4", "--gpu", "h100")
    run(folder / "bin/python", "-c", "import ballast; assert ballast.connect(rank=0, size=1).all_reduce([1]) == [1]")


wheel = Path(sys.argv[1]).resolve()
check_contents(wheel)
with tempfile.TemporaryDirectory() as folder:
    check_use(wheel, Path(folder))
print(f"{wheel.name} is as it should be")
