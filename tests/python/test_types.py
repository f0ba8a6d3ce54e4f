"""Tests that the package passes mypy in strict mode, and that its stubs have the names of the extension."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from ballast import _core

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mypy", reason="mypy is not installed: .ci/bootstrap venv")


def check(command: list[str], environment: dict[str, str], cache: Path) -> None:
    environment = {**environment, "MYPY_CACHE_DIR": str(cache)}
    ended = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_package_is_typed(environment, tmp_path):
    check(["mypy", "--strict", "--config-file", "pyproject.toml", "python/ballast"], environment, tmp_path)


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def names_of(statements: list[ast.stmt]) -> set[str]:
    found = [getattr(s, "name", None) or getattr(getattr(s, "target", None), "id", "_") for s in statements]
    assigned = [target.id for s in statements if isinstance(s, ast.Assign) for target in s.targets]
    return public([*found, *assigned])


def test_the_stubs_have_the_names_of_the_extension():
    stub = ast.parse((ROOT / "python/ballast/_core.pyi").read_text()).body
    only_types = {s.name for s in stub if isinstance(s, ast.ClassDef) and "TypedDict" in map(ast.unparse, s.bases)}
    assert names_of(stub) - only_types == public(vars(_core))
    for statement in stub:
        if isinstance(statement, ast.ClassDef) and statement.name not in only_types:
            members = public(vars(getattr(_core, statement.name)))
            assert names_of(statement.body) == members, statement.name
