"""The statistics of the last losses, and the tables of a page.

python3 benchmarks/formats/loss_table.py RUNS PAGE      replaces the tables in a page by those of a file of runs
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import runs
from variants import REFERENCE, SEEDS, TASKS, VARIANTS, Case, Task, Variant

# The quantile of Student's distribution for a 95 % interval of a mean of three, with two degrees of freedom.
QUANTILE = 4.303

COLUMNS = (
    "state",
    "gradients",
    "loss, mean of 3 seeds",
    "lowest to highest",
    "difference from fp32[^pairs]",
    "more than chance?",
)
HEAD = f"| {' | '.join(COLUMNS)} |"


class Difference(NamedTuple):
    """The mean of the differences from the reference with the same seed, and half the width of its 95 % interval."""

    mean: float
    within: float

    @property
    def finding(self) -> str:
        if not math.isfinite(self.mean):
            return "diverges"
        if abs(self.mean) <= self.within:
            return "no"
        return "yes, worse" if self.mean > 0 else "yes, better"


class Result(NamedTuple):
    """The last losses of a variant by seed. A variant is finished when all seeds are."""

    variant: Variant
    losses: dict[int, float]
    reference: dict[int, float]

    @property
    def is_finished(self) -> bool:
        return len(self.losses) == len(SEEDS)

    @property
    def is_reference(self) -> bool:
        return self.variant == REFERENCE

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def difference(self) -> Difference | None:
        """Return nothing where a seed of this variant or of the reference is missing."""
        if self.is_reference or not self.is_finished or len(self.reference) < len(SEEDS):
            return None
        return difference_of([self.losses[seed] - self.reference[seed] for seed in SEEDS])


def difference_of(pairs: list[float]) -> Difference:
    if not all(map(math.isfinite, pairs)):
        return Difference(math.nan, math.nan)
    return Difference(statistics.fmean(pairs), QUANTILE * statistics.stdev(pairs) / math.sqrt(len(pairs)))


def results_of(task: Task, finished: runs.Finished) -> list[Result]:
    """Return the results of a task in the order of the table, the unfinished ones included."""

    def losses(variant: Variant) -> dict[int, float]:
        cases = [Case(task, variant, seed) for seed in SEEDS]
        return {case.seed: finished[case]["loss"] for case in cases if case in finished}

    return [Result(variant, losses(variant), losses(REFERENCE)) for variant in VARIANTS]


def markdown(results: list[Result]) -> str:
    return "\n".join([HEAD, "|---" * len(COLUMNS) + "|", *(f"| {' | '.join(cells(result))} |" for result in results)]) + "\n"


def with_tables(page: str, finished: runs.Finished) -> str:
    """Return a page with the tables of all tasks, in their order, in the place of those that it has."""
    tables = [markdown(results_of(task, finished)) for task in TASKS]
    begins, *old = page.split(HEAD)
    if len(old) != len(tables):
        raise ValueError(f"the page must have {len(tables)} tables of losses, not {len(old)}")
    rests = [part[part.index("\n\n") + 1 :] for part in old]
    return begins + "".join(table + rest for table, rest in zip(tables, rests))


def cells(result: Result) -> list[str]:
    state = "`fp32`, `split`" if result.variant.state == "fp32" else f"`{result.variant.state}`"
    formats = [state, f"`{result.variant.gradients}`"]
    if not result.is_finished:
        return [*formats, f"unfinished: {len(result.losses)} of {len(SEEDS)} seeds", "", "", ""]
    losses = result.losses.values()
    found = result.difference
    difference = ["", ""] if found is None else [f"{found.mean:+.4f} ± {found.within:.4f}", found.finding]
    return [*formats, f"{result.mean:.4f}", f"{min(losses):.4f} to {max(losses):.4f}", *difference]


def records(task: Task, results: list[Result]) -> list[dict]:
    """Return a line for each finished variant; the ratio is above 1 where the loss is lower than with the reference."""
    return [record(task, result) for result in results if result.is_finished]


def record(task: Task, result: Result) -> dict:
    line = {"suite": "formats", "case": f"{task.name}, {result.variant.name}", "unit": "loss", "value": result.mean}
    difference = result.difference
    if difference is None:
        return {**line, "against": "", "ratio": None}
    reference = statistics.fmean(result.reference.values())
    compared = {"against": REFERENCE.name, "against_value": reference, "ratio": reference / result.mean}
    return {**line, **compared, "spread": difference.within / reference}


if __name__ == "__main__":
    recorded, shown = map(Path, sys.argv[1:])
    shown.write_text(with_tables(shown.read_text(), runs.read(recorded)))
