"""Runs the cases marked `emulated` on emulated GPUs, in a process of its own for each file, and reports each case here. That
process has the package that is built for the emulated GPUs, and a broken rule of CUDA ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

LIBRARY = "libballast_emulated_torch.so"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a kernel has one thread, as its stream has
REPORTS = "BALLAST_TEST_REPORTS"  # the file into which that process writes how each case ended


def mark_emulated(item: pytest.Item, build: Path) -> None:
    """Let the item report how the case of the same name ends there."""
    item.setup = lambda: None
    item.runtest = lambda: take_result(item, build)
    item.teardown = lambda: None


def take_result(item: pytest.Item, build: Path) -> None:
    if not (build / "python" / LIBRARY).exists():
        pytest.skip("emulated GPUs are not built: CMake found no torch for CPUs")
    cases = [each.nodeid for each in item.session.items if each.path == item.path and is_emulated(each)]
    results, output = run_cases(build, item.config.rootpath, tuple(cases))
    outcome, text = results.get(item.nodeid, ("failed", f"the process ended before this case did:\n{output[-8000:]}"))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)


def is_emulated(item: pytest.Item) -> bool:
    return item.get_closest_marker("emulated") is not None


@cache
def run_cases(build: Path, root: Path, cases: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], str]:
    """Return how each case ended, and all that the process wrote."""
    with TemporaryDirectory() as folder:
        reports = Path(folder) / "reports"
        reports.touch()
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *cases],
            cwd=root,
            env={**os.environ, **ONE_THREAD, "BALLAST_BUILD": str(build), REPORTS: str(reports)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = [json.loads(line) for line in reports.read_text().splitlines()]
    results: dict[str, tuple[str, str]] = {}
    for case, outcome, text in lines:
        if outcome != "passed" or case not in results:
            results[case] = (outcome, text)
    return results, ended.stdout


def write_report(report: pytest.TestReport) -> None:
    """Write how a phase of a case ended, if another process waits for it."""
    if REPORTS not in os.environ or (report.when != "call" and report.passed):
        return
    skipped = report.skipped and isinstance(report.longrepr, tuple)
    text = report.longrepr[2].removeprefix("Skipped: ") if skipped else report.longreprtext
    with open(os.environ[REPORTS], "a") as file:
        print(json.dumps([report.nodeid, report.outcome, text]), file=file)
