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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import suite

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


def difference_of(pairs: list[float]) -> Difference:
    if not all(map(math.isfinite, pairs)):
        return Difference(math.nan, math.nan)
    return Difference(statistics.fmean(pairs), QUANTILE * statistics.stdev(pairs) / math.sqrt(len(pairs)))


class Result(NamedTuple):
    """The last losses of a contender by seed, and those of the reference. The reference itself is compared with nothing."""

    contender: str
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
    def cells(self) -> list[str]:
        """Return a line of the table."""
        by_seed = [f"{self.losses[seed]:.4f}" if seed in self.losses else "unfinished" for seed in SEEDS]
        means = [f"{self.mean:.4f}", f"{self.spread:.4f}"] if self.is_finished else ["", ""]
        found = self.difference
        compared = ["", ""] if found is None else [f"{found.mean:+.4f} ± {found.within:.4f}", found.finding]
        return [self.contender, *by_seed, *means, *compared]


class Case(NamedTuple):
    contender: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.contender}, seed {self.seed}"


Finished = dict[Case, dict[str, Any]]


class Losses(NamedTuple):
    curve: list[tuple[int, float]]  # steps, and the mean loss of a few held-out sequences
    last: float  # the mean loss of more of them


# The folder that it gets is for what runs share.
Train = Callable[[Case, int, Path], Losses]


class Contest(NamedTuple):
    suite: str
    differs_in: str  # the field of a row and the column of the table that name a contender
    contenders: tuple[str, ...]
    update: tuple[str, ...]  # what all of them have in common: the update, and how ranks share a step
    task: Task = TRAINING

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
        """Return the runs in a file, which may have those of other contests too."""
        rows = suite.read_rows(path)
        if rows and not any(self.differs_in in row for row in rows):
            sys.exit(f"{self.suite}: cannot read runs from {path}: it has lines of a report, which --compare reads")
        return {Case(row[self.differs_in], row["seed"]): row for row in rows if row.get(self.differs_in) in self.contenders}

    def setting(self, steps: int) -> str:
        """Return in words what decides the losses, besides contender and seed."""
        import loss_training  # needs torch, which --help and --table do without

        own = loss_training.setting(self.task, steps, *self.update)
        begin = self._replace(task=TRAINING)
        return own if self == begin else f"{own}, after {begin.setting(steps * self.task.part)}"

    def row_of(self, case: Case) -> dict[str, Any]:
        return {self.differs_in: case.contender, "seed": case.seed}

    def make_runs(self, options: argparse.Namespace, train: Train) -> None:
        """Make the runs that the file lacks, and add each to the file with the machine and the command that repeats it."""
        finished, steps = self.read(options.runs), options.steps // self.task.part
        setting = self.setting(steps)
        for case, row in finished.items():
            if row["setting"] != setting:
                reason = f"{case.name} has '{row['setting']}', not '{setting}'"
                sys.exit(f"{self.suite}: cannot add to the recorded runs: {reason}; use another file")
        for case in (each for each in options.cases if each in self.cases and each not in finished):
            print(f"{self.suite}: {case.name}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            losses = train(case, steps, options.runs.with_suffix(""))
            seconds = round(time.monotonic() - begin, 1)
            row = {"curve": losses.curve, "loss": losses.last, "setting": setting, "seconds": seconds}
            command = shlex.join(["./run-benchmarks", self.suite, "--", "--only", case.name, "--steps", str(options.steps)])
            made = {"machine": suite.machine_name(), "commit": suite.commit(), "command": command}
            append(options.runs, {**self.row_of(case), **row, **made})
            print(f"{self.suite}: loss {losses.last:.4f}", file=sys.stderr, flush=True)

    def results(self, finished: Finished) -> list[Result]:
        """Return the results of the contenders in their order, the unfinished ones included."""
        losses = {
            name: {seed: finished[Case(name, seed)]["loss"] for seed in SEEDS if Case(name, seed) in finished}
            for name in self.contenders
        }
        theirs = losses[self.reference]
        return [Result(name, own, None if own is theirs else theirs) for name, own in losses.items()]

    def markdown(self, finished: Finished) -> str:
        seeds = (f"seed {seed}" for seed in SEEDS)
        compared = (f"difference from {self.reference}", "more than chance?")
        columns = [self.differs_in, *seeds, "mean", "highest less lowest", *compared]
        head, *rest = (f"| {' | '.join(line)} |" for line in (columns, *(result.cells for result in self.results(finished))))
        return "\n".join([head, "|---" * len(columns) + "|", *rest, ""])

    def records(self, finished: Finished) -> list[dict[str, Any]]:
        """Return two lines for each contender that has all seeds: the mean of its losses, and their spread. A ratio above 1 is
        a lower loss than that of the reference."""
        lines = []
        for result in self.results(finished):
            if not result.is_finished:
                continue
            line, found = suite.line(result.contender, result.mean, "loss"), result.difference
            if found is not None and result.reference is not None:
                theirs = statistics.fmean(result.reference.values())
                line |= {"against": self.reference, "against_value": theirs, "ratio": theirs / result.mean}
                line["spread"] = found.within / theirs
            lines += [line, suite.line(f"{result.contender}, spread of seeds", result.spread, "loss")]
        return lines


def append(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


# --- The command ---


class Suite(NamedTuple):
    """The program of a suite."""

    contests: Sequence[Contest]
    description: str | None
    steps: int
    train: Train
    more: Callable[[Finished], Iterable[dict[str, Any]]] = lambda finished: ()  # further lines of the report

    def main(self) -> None:
        options = self._arguments()
        for each in self.contests if not options.table else ():
            each.make_runs(options, self.train)
        finished = [(each, each.read(options.runs)) for each in self.contests]
        for each, rows in finished:
            suite.emit(each.suite, [*each.records(rows), *self.more(rows)])
        tables = "\n".join(each.markdown(rows) for each, rows in finished)
        print(f"\n{tables}", file=sys.stderr)
        if options.renew:
            suite.renew(options.renew, f"./run-benchmarks {self.contests[0].suite}", f"\n{tables}")

    def _arguments(self) -> argparse.Namespace:
        name = self.contests[0].suite
        parser = suite.parser_of(name, self.description)
        runs = f"the file of the finished runs ({name}.jsonl in the build)"
        parser.add_argument("--runs", type=Path, required=True, help=runs)
        multiple = POINTS * max(each.task.part for each in self.contests)
        parser.add_argument("--steps", type=int, default=self.steps, help=f"of a training, a multiple of {multiple}")
        parser.add_argument("--table", action="store_true", help="show the runs in the file, and train nothing")
        parser.add_argument("--renew", type=Path, metavar="PAGE", help="write the tables into this page")
        cases = [case for each in self.contests for case in each.cases]
        options = suite.choose(parser, cases, lambda case: case.name)
        if options.steps < multiple or options.steps % multiple:
            parser.error(f"--steps must be a multiple of {multiple}, not {options.steps}")
        return options
