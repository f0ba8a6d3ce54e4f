"""Trainings that differ in one thing, from each seed: the cases, the file of finished runs, the records and the table.

The first contender is the reference: the losses of the others are compared with its losses, seed by seed.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

import runs
from loss_table import Difference, difference_of
from variants import SEEDS


class Case(NamedTuple):
    contender: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.contender}, seed {self.seed}"


Finished = dict[Case, dict[str, Any]]


class Contest(NamedTuple):
    suite: str
    differs_in: str  # the field of a row and the column of the table that name a contender
    contenders: tuple[str, ...]

    @property
    def reference(self) -> str:
        return self.contenders[0]

    @property
    def cases(self) -> tuple[Case, ...]:
        """Return the runs in the order in which they are made.

        All contenders have one seed before the next one begins, so that an early stop leaves pairs to compare.
        """
        return tuple(Case(contender, seed) for seed in SEEDS for contender in self.contenders)

    def read(self, path: Path) -> Finished:
        return {Case(row[self.differs_in], row["seed"]): row for row in runs.rows_of(path)}

    def row_of(self, case: Case) -> dict[str, Any]:
        return {self.differs_in: case.contender, "seed": case.seed}

    def markdown(self, finished: Finished) -> str:
        head, *lines = (
            f"| {' | '.join(line)} |" for line in (self._columns, *(self._cells(each, finished) for each in self.contenders))
        )
        return "\n".join([head, "|---" * len(self._columns) + "|", *lines, ""])

    @property
    def _columns(self) -> tuple[str, ...]:
        seeds = (f"seed {seed}" for seed in SEEDS)
        return (
            self.differs_in,
            *seeds,
            "mean",
            "highest less lowest",
            f"difference from {self.reference}",
            "more than chance?",
        )

    def _cells(self, contender: str, finished: Finished) -> list[str]:
        losses = losses_of(contender, finished)
        of_seeds = [f"{losses[seed]:.4f}" if seed in losses else "unfinished" for seed in SEEDS]
        if len(losses) < len(SEEDS):
            return [contender, *of_seeds, "", "", "", ""]
        of_all = [f"{statistics.fmean(losses.values()):.4f}", f"{spread(losses):.4f}"]
        found = self._difference(contender, finished)
        compared = ["", ""] if found is None else [f"{found.mean:+.4f} ± {found.within:.4f}", found.finding]
        return [contender, *of_seeds, *of_all, *compared]

    def records(self, finished: Finished) -> list[dict[str, Any]]:
        """Return two lines for each contender that has all seeds: the mean of its losses, and their spread."""
        return [line for contender in self.contenders for line in self._records_of(contender, finished)]

    def _records_of(self, contender: str, finished: Finished) -> list[dict[str, Any]]:
        losses = losses_of(contender, finished)
        if len(losses) < len(SEEDS):
            return []
        mean = self.record(contender, statistics.fmean(losses.values()))
        found = self._difference(contender, finished)
        if found is not None:
            theirs = statistics.fmean(losses_of(self.reference, finished).values())
            ratios = {"ratio": theirs / mean["value"], "spread": found.within / theirs}
            mean |= {"against": self.reference, "against_value": theirs, **ratios}
        return [mean, self.record(f"{contender}, spread of seeds", spread(losses))]

    def record(self, case: str, value: float) -> dict[str, Any]:
        return {"suite": self.suite, "case": case, "value": value, "unit": "loss", "against": "", "ratio": None}

    def _difference(self, contender: str, finished: Finished) -> Difference | None:
        """Return nothing for the reference, and where a seed is missing."""
        losses, reference = losses_of(contender, finished), losses_of(self.reference, finished)
        if contender == self.reference or len(losses) < len(SEEDS) or len(reference) < len(SEEDS):
            return None
        return difference_of([losses[seed] - reference[seed] for seed in SEEDS])


def losses_of(contender: str, finished: Finished) -> dict[int, float]:
    """Return the last losses by seed, without seeds that are unfinished."""
    cases = [Case(contender, seed) for seed in SEEDS]
    return {case.seed: finished[case]["loss"] for case in cases if case in finished}


def spread(losses: dict[int, float]) -> float:
    return max(losses.values()) - min(losses.values())
