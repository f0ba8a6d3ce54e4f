"""Finds the built package: in BALLAST_BUILD, or in the folder of the release preset."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from python import emulated_cases

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
PACKAGE = BUILD / "python"
IS_EMULATED = (PACKAGE / emulated_cases.LIBRARY).exists()  # this process runs cases on emulated GPUs
LONG = {  # files that take a minute or more; they begin first, so that all processes end at about the same time
    "test_accelerate.py",
    "test_between_hosts.py",
    "test_checkpoint.py",
    "test_compiled.py",
    "test_emulated_gpu.py",
    "test_emulated_gpus.py",
    "test_emulated_order.py",
    "test_examples.py",
    "test_faults.py",
    "test_gather_writes.py",
    "test_gpu.py",
    "test_keywords.py",
    "test_launchers.py",
    "test_leaving.py",
    "test_limits.py",
    "test_outer.py",
    "test_lost_hosts.py",
    "test_packed.py",
    "test_pages.py",
    "test_ranks.py",
    "test_ray.py",
    "test_soak.py",
    "test_trainers.py",
}
BUILT = any((PACKAGE / "ballast").glob("_core*.so"))
if BUILT:
    sys.path.insert(0, str(PACKAGE))
    # The fork server of multiprocessing imports Ballast once for all ranks, but not before the emulation is installed.
    os.environ["PYTHONPATH"] = "" if IS_EMULATED else str(PACKAGE)
    if IS_EMULATED:
        from python import emulated_gpu  # needs torch

        emulated_gpu.install(PACKAGE)
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    return f"ballast: {PACKAGE if BUILT else 'not built (BALLAST_PYTHON=ON): its tests are left out'}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "emulated: runs on an emulated GPU, in another process")
    config.addinivalue_line("markers", "thorough: takes long and seldom fails alone; runs with BALLAST_THOROUGH=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("BALLAST_THOROUGH"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)  # the summary counts them
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.name not in LONG)
    if not IS_EMULATED:
        for item in filter(emulated_cases.is_emulated, items):
            emulated_cases.mark_emulated(item, BUILD / "tests" / "emulated_cuda" / "torch")


def pytest_collection_finish() -> None:
    gc.freeze()  # each full collection in a test would otherwise visit all of torch, for a third of a second


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    emulated_cases.write_report(report)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return the environment of a process that imports the package."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE)}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process. It returns the exit code and both outputs."""
    from ballast.tools.command_line import main

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
