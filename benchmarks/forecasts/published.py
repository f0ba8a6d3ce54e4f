"""Compare the planner's forecasts with published speeds of other systems, each with its placement as published.

    PYTHONPATH=build/release/python:benchmarks/harness python3 benchmarks/forecasts/published.py           print the table
    PYTHONPATH=build/release/python:benchmarks/harness python3 benchmarks/forecasts/published.py --write   and write it

published.json has the figures with their sources, and for each the options of ballast.plan() that describe it. A row that was
`held_out` was not looked at for the constants of python/ballast/planning/hardware.py.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import suite
from ballast.planning.request import candidates, request_plan

DATA = Path(__file__).with_name("published.json")
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "forecasts.md"
ENOUGH = {"gpu_memory": "8TiB", "host_memory": "1PiB", "headroom": 0}  # a published figure says that its placement fits

THEIR_RATES = {"shared": "1B/s"}  # those systems exchange parameters and gradients between GPUs

@dataclass(frozen=True)
class Row:
    """A published figure in tokens a second, and the forecast."""

    system: str
    configuration: str
    source: str
    tokens_per_second: float
    held_out: bool
    plan: dict[str, Any]
    waits: bool = True  # no step begins before the updates of the last one, as in most systems
    note: str = ""
    not_explained: str = ""  # why the figure is not one that the forecast is for

    @cached_property
    def forecast(self) -> float:
        options = {**self.plan, **ENOUGH}
        options["rates"] = THEIR_RATES | options.get("rates", {})
        request = request_plan(options.pop("model"), **options)
        request.exact.waits_for_updates = self.waits
        plans = (request.plan(request.exact.price(placement)) for placement in candidates(request))
        return max(plan.tokens_per_second for plan in plans)


def rows() -> list[Row]:
    return [Row(**row) for row in json.loads(DATA.read_text())]


def error(row: Row) -> float:
    """Return how far the forecast is from the figure, relative to the figure."""
    return row.forecast / row.tokens_per_second - 1


def table(found: Sequence[Row]) -> str:
    """Return tables of Markdown: the errors, the rows, and the rows that are not explained."""
    explained = [row for row in found if not row.not_explained]
    head = ["| system | configuration | published | forecast | error |", "|---|---|---|---|---|"]
    errors = {
        "all rows": [abs(error(row)) for row in explained],
        "rows by which constants were set": [abs(error(row)) for row in explained if not row.held_out],
        "rows that were held out": [abs(error(row)) for row in explained if row.held_out],
    }
    summary = [
        f"| {name} | {len(each)} | {statistics.median(each):.1%} | {max(each):.1%} |" for name, each in errors.items()
    ]
    return "\n".join(
        [
            *("| error | rows | median | largest |", "|---|---|---|---|", *summary, ""),
            *(*head, *(_line(row) for row in explained), ""),
            *("Figures that the forecast is not for, which are in no median:", ""),
            *(*head, *(_line(row) for row in found if row.not_explained)),
        ]
    )


def _line(row: Row) -> str:
    note = "; ".join(each for each in (row.note, row.not_explained) if each)
    words = f"{row.configuration}{f' ({note})' if note else ''}{' *' if row.held_out else ''}"
    return (
        f"| [{row.system}]({row.source}) | {words} | {row.tokens_per_second:,.0f} | {row.forecast:,.0f} | {error(row):+.0%} |"
    )


def main() -> None:
    text = table(rows())
    print(text)
    if "--write" in sys.argv[1:]:
        suite.renew(PAGE, "benchmarks/forecasts/published.py", text)


if __name__ == "__main__":
    main()
