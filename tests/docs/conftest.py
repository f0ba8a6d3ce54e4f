"""Skips these tests if the package is not built or torch is not installed."""

from importlib.util import find_spec

from python.conftest import BUILT, environment  # noqa: F401

if not BUILT or find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
