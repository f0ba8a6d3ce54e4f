"""Trainings that differ in one thing, from each seed: the cases, the file of finished runs, the statistics and the command.

A suite repeats no run that its file has, so it can stop and continue later. The first contender is the reference: the losses of
the others are compared with its losses, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import suite
from suite import read_rows

SEEDS = (0, 1, 2)
POINTS = 20  # points of a curve of losses


class Task(NamedTuple):
    """What a run trains: the text, the schedule, and whether it begins with trained parameters."""

    name: str
    text: str
    part: int  # its steps are those of `training` divided by this
    learning_rate: float  # the highest, after the warm-up
    warm_up: float  # the part of the steps in which the learning rate rises


# The losses of 3e-4 and 1e-3 differ by less than 0.02 after 300 steps of training in fp32: the best rate is between them.
TRAINING = Task("training", "torch's Python sources", part=1, learning_rate=5e-4, warm_up=0.05)
FINE_TUNING = Task("fine-tuning", "Python's help topics", part=5, learning_rate=3e-4, warm_up=0.05)

QUANTILE = 4.303  # a quantile of Student's distribution, for a 95 % interval of a mean of three: two degrees of freedom


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

    @property
    def cells(self) -> list[str]:
        return [f"{self.mean:+.4f} ± {self.within:.4f}", self.finding]


def difference_of(pairs: list[float]) -> Difference:
    if not all(map(math.isfinite, pairs)):
        return Difference(math.nan, math.nan)
    return Difference(statistics.fmean(pairs), QUANTILE * statistics.stdev(pairs) / math.sqrt(len(pairs)))


class Result(NamedTuple):
    """The last losses of a contender by seed, and those of the reference. The reference itself is compared with nothing."""

    contender: Any
    losses: Mapping[int, float]
    reference: Mapping[int, float] | None

    @property
    def is_finished(self) -> bool:
        return len(self.losses) == len(SEEDS)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def spread(self) -> float:
        return max(self.losses.values()) - min(self.losses.values())

    @property
    def difference(self) -> Difference | None:
        """Return nothing for the reference, and where a seed is missing."""
        if self.reference is None or not self.is_finished or len(self.reference) < len(SEEDS):
            return None
        return difference_of([self.losses[seed] - self.reference[seed] for seed in SEEDS])

    @property
    def compared_cells(self) -> list[str]:
        return ["", ""] if self.difference is None else self.difference.cells

    def record(self, suite_name: str, case: str, reference: str) -> dict[str, Any]:
        """Return the line of the mean; a ratio above 1 is a lower loss than that of the reference, which has this name."""
        line, found = record(suite_name, case, self.mean), self.difference
        if found is None or self.reference is None:
            return line
        theirs = statistics.fmean(self.reference.values())
        compared = {"against": reference, "against_value": theirs, "ratio": theirs / self.mean, "spread": found.within / theirs}
        return line | compared


def record(suite_name: str, case: str, loss: float) -> dict[str, Any]:
    return {"suite": suite_name, "case": case, "value": loss, "unit": "loss", "against": "", "ratio": None}


def results_of(
    contenders: Sequence[Any], reference: Any, cases_of: Callable[[Any], Iterable[Any]], finished: Mapping[Any, Any]
) -> list[Result]:
    """Return the results of contenders in their order, the unfinished ones included. `finished` has the rows by case."""

    def losses(contender: Any) -> dict[int, float]:
        return {case.seed: finished[case]["loss"] for case in cases_of(contender) if case in finished}

    return [Result(each, losses(each), None if each == reference else losses(reference)) for each in contenders]


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in (columns, *lines))
    return "\n".join([head, "|---" * len(columns) + "|", *rest, ""])


# --- The file of runs, as JSON lines ---


def append(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def refuse_other_settings(suite_name: str, finished: Mapping[Any, Any], setting_of: Callable[[Any], str]) -> None:
    """End the program if the losses of a recorded run cannot be compared with those of the runs to make."""
    for case, row in finished.items():
        if row["setting"] != setting_of(case):
            reason = f"{case.name} has '{row['setting']}', not '{setting_of(case)}'"
            sys.exit(f"{suite_name}: cannot add to the recorded runs: {reason}; use another file")


# --- The command ---


class Losses(Protocol):
    curve: list[tuple[int, float]]
    last: float


def parser_of(suite_name: str, description: str | None, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=suite_name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    meaning = f"the file of the finished runs ({suite_name}.jsonl in the build)"
    parser.add_argument("--runs", type=Path, required=True, help=meaning)
    parser.add_argument("--steps", type=int, default=steps, help=f"of a training, a multiple of {POINTS}")
    parser.add_argument("--table", action="store_true", help="show the runs in the file, and train nothing")
    return parser


def choose(parser: argparse.ArgumentParser, cases: Sequence, multiple: int = POINTS) -> argparse.Namespace:
    options = suite.choose(parser, cases, lambda case: case.name)
    if options.steps < multiple or options.steps % multiple:
        parser.error(f"--steps must be a multiple of {multiple}, not {options.steps}")
    return options


def record_run(suite_name: str, name: str, options: argparse.Namespace, train: Callable[[], dict[str, Any]]) -> None:
    """Make a run, whose row `train` returns, and add it to the file with the machine and the command that repeats it."""
    print(f"{suite_name}: {name}", file=sys.stderr, flush=True)
    row = train()
    command = shlex.join(["./run-benchmarks", suite_name, "--", "--only", name, "--steps", str(options.steps)])
    append(options.runs, {**row, "machine": suite.machine_name(), "commit": suite.commit(), "command": command})
    print(f"{suite_name}: loss {row['loss']:.4f}", file=sys.stderr, flush=True)


# --- Contests whose contenders have nothing but a name ---


class Case(NamedTuple):
    contender: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.contender}, seed {self.seed}"

    def folder(self, steps: int) -> str:
        """Return the name of the folder with what a stopped run has trained."""
        return f"{self.contender.replace(',', '').replace(' ', '-')}-seed-{self.seed}-{steps}-steps"


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
        return {Case(row[self.differs_in], row["seed"]): row for row in read_rows(path)}

    def row_of(self, case: Case) -> dict[str, Any]:
        return {self.differs_in: case.contender, "seed": case.seed}

    def make_runs(
        self, options: argparse.Namespace, setting: str, train: Callable[[Case, int, Path], Losses]
    ) -> None:
        """Make the runs that the file lacks. `setting` tells in words what decides the losses, besides contender and seed; the
        folder that `train` gets is for what a stopped run has trained."""
        finished = self.read(options.runs)
        refuse_other_settings(self.suite, finished, lambda case: setting)

        def row_of(case: Case) -> dict[str, Any]:
            losses = train(case, options.steps, options.runs.with_suffix("") / case.folder(options.steps))
            return {**self.row_of(case), "curve": losses.curve, "loss": losses.last, "setting": setting}

        for case in options.cases:
            if case not in finished:
                record_run(self.suite, case.name, options, lambda case=case: row_of(case))

    def show(self, finished: Finished, more: Sequence[dict[str, Any]] = (), text: str = "") -> None:
        """Print the lines of a report, and the table for people."""
        suite.emit([*self.records(finished), *more])
        print(f"\n{self.markdown(finished)}{text}", file=sys.stderr)

    def results(self, finished: Finished) -> list[Result]:
        return results_of(self.contenders, self.reference, lambda name: [Case(name, seed) for seed in SEEDS], finished)

    def markdown(self, finished: Finished) -> str:
        seeds = (f"seed {seed}" for seed in SEEDS)
        compared = (f"difference from {self.reference}", "more than chance?")
        columns = [self.differs_in, *seeds, "mean", "highest less lowest", *compared]
        return markdown(columns, (self._cells(result) for result in self.results(finished)))

    def _cells(self, result: Result) -> list[str]:
        by_seed = [f"{result.losses[seed]:.4f}" if seed in result.losses else "unfinished" for seed in SEEDS]
        if not result.is_finished:
            return [result.contender, *by_seed, "", "", "", ""]
        return [result.contender, *by_seed, f"{result.mean:.4f}", f"{result.spread:.4f}", *result.compared_cells]

    def records(self, finished: Finished) -> list[dict[str, Any]]:
        """Return two lines for each contender that has all seeds: the mean of its losses, and their spread."""
        lines = []
        for result in self.results(finished):
            if result.is_finished:
                lines.append(result.record(self.suite, result.contender, self.reference))
                lines.append(record(self.suite, f"{result.contender}, spread of seeds", result.spread))
        return lines
