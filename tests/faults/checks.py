"""Judges a cell: the other ranks end in time and name the culprit, nothing is lost, nothing is left."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from faults.jobs import Ended, Ranks
from faults.matrix import ENDS, LEAST, RACES, RANKS, Cell

TRAINED = re.compile(r"began after step (\d) and ended with (\w+)")
OPERATION = r"where:|in the middle of a step"
CALL = r"ballast\.(?:save|load_checkpoint|wrap)\(|optimizer\.(?:step|close)\(|\.backward\("  # a line of the traceback
RECORDS = {"ballast.lock", "state.records", "state.description", "newest-checkpoint"}


@dataclass
class Outcome:
    """How a cell has ended, in the words of the table, and what is wrong with it."""

    words: str
    problems: list[str] = field(default_factory=list)


def judge(cell: Cell, ranks: Ranks) -> Outcome:
    with TemporaryDirectory(prefix="ballast-faults-") as temporary:
        folder = Path(temporary)
        for name in ("records", "tmp"):
            (folder / name).mkdir()
        shared = set(os.listdir("/dev/shm"))
        expected = undisturbed(Cell("exception" if cell.in_python else "kill", "start", cell.transport), ranks)
        ended, late = ranks.run(cell, cell.fault, folder)
        outcome = Outcome(words_of(cell, ended), late)
        outcome.problems += errors_problems(cell, ended, expected)
        outcome.problems += resume_problems(cell, ranks, folder, expected)
        outcome.problems += left_problems(folder, shared)
        return outcome


@cache
def undisturbed(cell: Cell, ranks: Ranks) -> tuple[str, ...]:
    """Return what each rank says in a training without a fault."""
    with TemporaryDirectory(prefix="ballast-faults-") as temporary:
        for name in ("records", "tmp"):
            (Path(temporary) / name).mkdir()
        ended, problems = ranks.run(cell, "none", Path(temporary))
    assert not problems and all(each.status == 0 for each in ended), (problems, ended)
    return tuple(each.said for each in ended)


def has_trained(ended: Ended) -> bool:
    return ended.status == 0 and TRAINED.search(ended.said) is not None


def code_of(said: str) -> str:
    found = re.search(r"\bB\d{4}\b", last_error(said))
    return found[0] if found else "no code"


def last_error(said: str) -> str:
    """Return the error with which a rank has ended: in Python, the last one of the traceback."""
    parts = re.split(r"^(?=[\w.]+(?:Error|Exit)\b)", said, flags=re.MULTILINE)
    return parts[-1]


def survivors(cell: Cell) -> list[int]:
    return [rank for rank in range(RANKS) if rank != cell.victim]


def words_of(cell: Cell, ended: list[Ended]) -> str:
    """Return the outcome in a word or a code: it has to be the same in each run."""
    if cell[:2] in RACES:
        return "continues or ends"
    if all(has_trained(each) for each in ended):
        return "continues"
    judged = range(RANKS) if cell.everywhere else survivors(cell)
    codes = {code_of(ended[rank].said) for rank in judged if not has_trained(ended[rank])}
    if not codes:
        return "only that rank ends"
    if codes == {"no code"}:
        return "all end"
    return "/".join(sorted(codes - {"B3301", "no code"})) or "B3301"  # others may report what one rank has noticed


def errors_problems(cell: Cell, ended: list[Ended], expected: tuple[str, ...]) -> list[str]:
    """Return what is wrong with how ranks have ended."""
    problems = []
    for rank in range(RANKS) if cell.everywhere else survivors(cell):
        status, said = ended[rank]
        if has_trained(ended[rank]):
            problems += wrong_bits(said, expected[rank])
        elif cell.everywhere and cell.fault in ENDS:
            problems += [] if status < 0 else [f"rank {rank} did not end with its process: {said}"]
        else:
            problems += unclear(cell, rank, status, said)
    if cell.fault in ENDS and cell.phase != "close" and all(has_trained(each) for each in ended):
        problems.append("no rank reported the fault")
    return problems


def unclear(cell: Cell, rank: int, status: int, said: str) -> list[str]:
    """Return what the error of a rank should say and does not."""
    problems = []
    error = last_error(said)
    if status != 1 or code_of(said) == "no code":
        problems.append(f"rank {rank} ended with status {status} and without an error that has a code: {said[-2000:]}")
    elif not cell.everywhere and not re.search(rf"\branks? (\d, )*{cell.victim}\b", error):
        problems.append(f"the error of rank {rank} does not name rank {cell.victim}: {error}")
    elif not re.search(OPERATION, error) and not re.search(CALL, said) and cell.phase != "start":
        problems.append(f"the error of rank {rank} does not name the operation: {error}")
    if re.search(r"\b(?:B2202|B3201)\b", error) and not re.search(r"/(?:records|checkpoints)\b", error):
        problems.append(f"the error of rank {rank} does not name the file: {error}")
    return problems


def wrong_bits(said: str, expected: str) -> list[str]:
    found, right = TRAINED.search(said), TRAINED.search(expected)
    assert found and right
    return [] if found[2] == right[2] else [f"other bits than without a fault: {said}"]


def resume_problems(cell: Cell, ranks: Ranks, folder: Path, expected: tuple[str, ...]) -> list[str]:
    """Start the job again, without the fault. Return what it has lost."""
    ended, problems = ranks.run(cell, "none", folder)
    for rank, (each, right) in enumerate(zip(ended, expected, strict=True)):
        found = TRAINED.search(each.said)
        if each.status != 0 or not found:
            problems.append(f"rank {rank} does not resume: {each.said[-2000:]}")
            continue
        problems += wrong_bits(each.said, right)
        if int(found[1]) < LEAST[cell.phase]:
            problems.append(f"rank {rank} resumes from step {found[1]}: committed steps are lost")
        for step, held in re.findall(r"checkpoint of step (\d) holds (\w+)", each.said):
            if f"step {step} has {held}" not in right:
                problems.append(f"rank {rank}: the checkpoint of step {step} has other bits than the training")
        if cell.in_python and cell.phase in ("commit", "save", "close") and "checkpoint of step" not in each.said:
            problems.append(f"rank {rank} has lost its checkpoint")
    return problems


def left_problems(folder: Path, shared: set[str]) -> list[str]:
    """Return what is left after the next job, which cleans up what a killed one could not."""
    # Python's semaphores are those of other tests, which run at the same time.
    named = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
    problems = [f"/dev/shm/{name} is left" for name in named - shared]
    problems += [f"{path.name} is left in the temporary folder" for path in (folder / "tmp").iterdir()]
    for directory in (folder / "records").iterdir():
        names = {path.name for path in directory.iterdir()}
        if not re.fullmatch(r"cell-rank-[0-2]", directory.name) or not names <= RECORDS:
            problems.append(f"{directory.name} holds {sorted(names)}")
    checkpoints = folder / "checkpoints"
    if checkpoints.exists():
        names = {path.name for path in checkpoints.iterdir()}
        folders = {name for name in names if name.startswith("step-")}
        if len(folders) != 1 or names - folders != {"ballast.lock", "checkpoint.json"}:
            problems.append(f"the directory of checkpoints holds {sorted(names)}")
    return problems
