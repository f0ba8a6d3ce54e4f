"""Find the lines of a log that tell the most, for the page of text, and the figures that a step has measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MOST_LINES = 40
MOST_CHARACTERS = 160

# A line that matches is shown. In the order of: our own programs, CMake and compilers, ctest, Catch2, pytest,
# compute-sanitizer.
TELLING = re.compile(
    r"^== |^error|^B\d{4} "
    r"|CMake Error|: (fatal )?error:|^FAILED: |^-- Ballast: |undefined reference"
    r"|tests passed, |\((Failed|Timeout|Skipped|SEGFAULT|Subprocess aborted)\)|^test skipped: |No tests were found"
    r"|^All tests passed|^test cases: |: FAILED:$"
    r"|^(FAILED|ERROR|SKIPPED) |^=+ .*\b(passed|failed|skipped|error)|^E  +\w*(Error|Exception)"
    r"|NVRM: Xid|ERROR SUMMARY|RACECHECK SUMMARY|^========= (Invalid|Race|Error|Warning|Program hit)"
)
# They name nothing, and would fill the page.
REPEATED = re.compile(r"^ninja: build stopped|^\[\d+/\d+\]")


def findings(log: str) -> list[str]:
    """Return the telling lines, each once, at most MOST_LINES of them. The end of the log decides, so the last ones stay."""
    lines = [line.strip() for line in log.splitlines() if TELLING.search(line) and not REPEATED.search(line)]
    each = list(dict.fromkeys(line[:MOST_CHARACTERS] for line in lines))
    left_out = len(each) - MOST_LINES
    return each if left_out <= 0 else [f"({left_out} more lines are in the log)", *each[left_out:]]


def has_run_no_test(log: str) -> bool:
    """Tell whether ctest or a test program has skipped all of its tests, which neither of them calls a failure."""
    if re.search(r"(test skipped|SKIPPED \[\d+\] .*): no usable GPU", log):
        return True
    total = re.search(r"tests failed out of (\d+)", log)
    skipped = len(re.findall(r"^\s*\d+ - .* \(Skipped\)$", log, re.M))
    return total is not None and skipped >= int(total[1])


def last_lines(log: str, count: int) -> list[str]:
    """Return the end of a log, for a failure without a telling line."""
    lines = [line.strip()[:MOST_CHARACTERS] for line in log.splitlines() if line.strip()]
    return lines[-count:]


FIGURES = "figures "


def figures_line(name: str, figures: Mapping[str, Any]) -> str:
    """Return a line of a log that holds figures under a name."""
    return FIGURES + json.dumps({name: figures})


def figures_in(log: str) -> dict[str, Any]:
    """Return the figures of a log by name. Of two lines with one name the later one counts; a line that a cut has left
    unfinished does not."""
    found: dict[str, Any] = {}
    for line in log.splitlines():
        if line.startswith(FIGURES):
            try:
                found |= json.loads(line.removeprefix(FIGURES))
            except ValueError:
                continue
    return found
