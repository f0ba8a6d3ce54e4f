"""Finds the built package: in BALLAST_BUILD, or in the folder of the release preset."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
PACKAGE = BUILD / "python"
BUILT = any((PACKAGE / "ballast").glob("_core*.so"))
if BUILT:
    sys.path.insert(0, str(PACKAGE))
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    return f"ballast: {PACKAGE if BUILT else 'not built (BALLAST_PYTHON=ON): its tests are left out'}"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return the environment of a process that imports the package."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE)}
