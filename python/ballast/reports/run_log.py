"""Read the files of a `ballast.StepLog`: one of each rank, a JSON object on each line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checks import fail, is_number, refuse

FORMAT = 1  # the newest one that is read here
NAME = re.compile(r"rank-(\d+)\.jsonl")
NEEDED = {"step", "seconds", "at"}  # of each step
MOST = 1e18  # of a figure of a step

Step = dict[str, Any]


@dataclass(frozen=True)
class Stretch:
    """The steps that one process made, and what it said about the training."""

    first: int  # step
    about: dict[str, Any]


@dataclass(frozen=True)
class RankLog:
    """The steps of one rank, in their order, and the stretches in which its processes made them."""

    rank: int
    stretches: Sequence[Stretch]
    steps: Sequence[Step]

    @property
    def about(self) -> dict[str, Any]:
        """What the last process said about the training."""
        return self.stretches[-1].about if self.stretches else {}

    def values(self, name: str) -> list[float]:
        """Return the values of this name, of the steps that have it."""
        return [step[name] for step in self.steps if step.get(name) is not None]


def read_run(folder: Path) -> list[RankLog]:
    """Return the ranks of a run, by number."""
    if not folder.is_dir():
        refuse(f"cannot read {folder}: there is no such directory", needed="the folder of a ballast.StepLog")
    files = {int(found[1]): path for path in folder.iterdir() if (found := NAME.fullmatch(path.name))}
    logs = [_read(rank, files[rank]) for rank in sorted(files)]
    logs = [_in_stretches(log, logs[0].stretches) for log in logs]
    if not any(log.steps for log in logs):
        what = "it has no steps" if files else "there is no file rank-0.jsonl"
        refuse(f"cannot read {folder}: {what}", needed="the folder of a ballast.StepLog that a training calls after step()")
    return [log for log in logs if log.steps]


def _read(rank: int, path: Path) -> RankLog:
    about: dict[str, Any] | None = None  # of a process whose first step comes next
    stretches: list[Stretch] = []
    steps: list[Step] = []
    for line in _lines(path):
        if "format" in line:
            about = line
            _require_known(line["format"], path)
            continue
        if about is not None:  # it resumed: what the earlier process did after the checkpoint is not part of the training
            first, steps = int(line["step"]), [step for step in steps if step["step"] < line["step"]]
            stretches, about = [*(each for each in stretches if each.first < first), Stretch(first, about)], None
        steps.append(line)
    return RankLog(rank, stretches, steps)


def _in_stretches(log: RankLog, of_run: Sequence[Stretch]) -> RankLog:
    """Leave out steps of a rank that a stretch of the run without this rank made again."""
    own = {stretch.first for stretch in log.stretches}
    ends = [*(stretch.first for stretch in of_run[1:]), math.inf]
    others = [(stretch.first, end) for stretch, end in zip(of_run, ends) if own and stretch.first not in own]
    steps = [step for step in log.steps if not any(first <= step["step"] < end for first, end in others)]
    return RankLog(log.rank, log.stretches, steps)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines. A process that was stopped leaves a part of a line, the last one or one before a description."""
    texts = [text for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if text]
    objects = [_object(text) for text in texts]
    for number, line in enumerate(objects):
        if line is not None:
            yield line
        elif number + 1 < len(objects) and "format" not in (objects[number + 1] or {}):
            what = f"cannot read {path}: line {number + 1} is neither a description nor a step"
            refuse(what, needed="a file of a ballast.StepLog")


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and (_is_description(found) or _is_step(found)) else None


def _is_description(found: dict[str, Any]) -> bool:
    return "format" in found and is_number(found.get("rank", 0))


def _is_step(found: dict[str, Any]) -> bool:
    """Return whether the line has the figures of a step: all values are numbers that a page can show, or null."""
    numbers = [float(value) for value in found.values() if isinstance(value, bool) or is_number(value)]
    are_known = len(numbers) == sum(value is not None for value in found.values())
    return are_known and all(found.get(name) is not None for name in NEEDED) and all(abs(each) <= MOST for each in numbers)


def _require_known(number: object, path: Path) -> None:
    if not isinstance(number, int) or not 0 <= number <= FORMAT:
        fail(
            "newer_format",
            _core.Problem(
                what=f"cannot read {path}: a newer Ballast has written it",
                needed=f"format {FORMAT}",
                available=f"format {number}",
            ),
        )
