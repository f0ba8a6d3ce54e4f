"""Runs programs that must end without output to stderr."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def folder_with_dill() -> str:
    """Return the folder of dill. torch imports dill if it is installed, and objects then live longer at exit."""
    found = find_spec("dill")
    if found is None or found.origin is None:
        pytest.skip("dill is not installed: tests/python-requirements.txt")
    return str(Path(found.origin).parents[1])


def folder_without_dill(folder: Path) -> str:
    """Return a folder that hides dill from programs, even where it is installed."""
    (folder / "sitecustomize.py").write_text('import sys\nsys.modules["dill"] = None\n')
    return str(folder)


def run_silently(command: list[Any], environment: dict[str, str], *folders: str) -> str:
    """Return what the program prints. Every warning is an error in it, and it writes nothing to stderr."""
    paths = ":".join([*folders, environment["PYTHONPATH"], str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, *command],
        env={**environment, "PYTHONPATH": paths, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout
