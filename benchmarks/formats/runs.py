"""A file of finished runs, as JSON lines. A suite repeats no run that the file has, so it can stop and continue later."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from variants import FINE_TUNING, START, TASKS, Case, Variant


class Row(TypedDict):
    """A finished run, as a line of the file."""

    task: str
    state: str
    gradients: str
    seed: int
    setting: str  # everything else that decides the losses
    curve: list[tuple[int, float]]
    loss: float
    seconds: float
    machine: str
    commit: str
    command: str


Finished = dict[Case, Row]


def read(path: Path) -> Finished:
    return {case_of(row): row for row in rows_of(path)}


def rows_of(path: Path) -> list[Any]:
    """Return the lines of a file, which has none before it exists."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def case_of(row: Row) -> Case:
    task = next(task for task in TASKS if task.name == row["task"])
    return Case(task, Variant(row["state"], row["gradients"]), row["seed"])


def refuse_other_settings(rows: Iterable[Row], settings: Mapping[str, str]) -> None:
    """Raise ValueError for a run whose losses cannot be compared with those of the runs to make."""
    for row in rows:
        if row["setting"] != settings[row["task"]]:
            ours = f"has '{row['setting']}', not '{settings[row['task']]}'"
            raise ValueError(f"cannot add to the recorded runs: {case_of(row).name} {ours}; use another file")


def remaining(chosen: Sequence[Case], finished: Collection[Case], has_start: bool) -> list[Case]:
    """Return the runs to make. Fine-tuning needs the parameters of START, which are made again if they are lost."""
    missing = [case for case in chosen if case not in finished]
    if has_start or all(case.task != FINE_TUNING for case in missing):
        return missing
    return [START, *(case for case in missing if case != START)]
