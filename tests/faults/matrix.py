"""The cells of the fault matrix: which fault, in which phase of a training, over which transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "exception": "an exception in the training program",
    "sys.exit": "`sys.exit(3)`",
    "SIGTERM": "SIGTERM, without a handler",
    "full drive": "every write fails with ENOSPC",
    "EIO": "every read, write and flush fails with EIO",
    "cut link": "all connections of the rank are shut",
    "no memory": "the process gets no more memory (RLIMIT_AS)",
    "thread limit": "the process gets no more threads (EAGAIN)",
    "descriptor limit": "the process gets no more descriptors (RLIMIT_NOFILE)",
}
PHASES = {
    "start": "before the rank has met the others",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "before the rank calls `step()`",
    "commit": "after `step()`, while its records are written",
    "save": "when the rank opens its first file of `save()`",
    "load": "when the rank opens its first file of `load_checkpoint()`",
    "close": "before the rank calls `close()`",
}
TRANSPORTS = {"threads": "threads", "shared memory": "shared memory", "gloo": "Gloo", "nccl": "emulated NCCL"}
RANKS = 3
TIMEOUT = 3  # seconds that a rank waits for others, where there is a fault
PROGRAMS = ("exception", "sys.exit")  # faults of the training program
ENDS = ("kill", "SIGTERM", "sys.exit", "exception", "stop")  # faults after which a rank is gone
RACES = {("full drive", "close"), ("EIO", "close")}  # the last records may be written before the fault
LEAST = {"start": 0, "forward": 1, "backward": 1, "step": 1, "commit": 2, "save": 3, "load": 1, "close": 3}  # steps that stay


class Cell(NamedTuple):
    fault: str
    phase: str
    transport: str

    @property
    def victim(self) -> int:
        """Return the rank that has the fault. Each is it somewhere: rank 0 has the hub."""
        return (list(FAULTS).index(self.fault) + list(PHASES).index(self.phase)) % RANKS

    @property
    def in_python(self) -> bool:
        return self.transport in ("shared memory", "gloo") and (self.phase in ("save", "load") or self.fault in PROGRAMS)

    @property
    def everywhere(self) -> bool:
        """Return whether all ranks have the fault: it is one of their process."""
        return self.transport == "threads" and self.fault != "exception"

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {self.transport}"


def cells() -> Iterator[Cell]:
    for phase in PHASES:
        for fault in FAULTS:
            for transport in TRANSPORTS:
                yield Cell(fault, phase, transport)


def impossible(cell: Cell) -> str:
    """Return why the cell cannot exist, if it cannot: a letter of REASONS."""
    if cell.phase in ("save", "load") and cell.transport == "threads":
        return "a"
    if cell.phase in ("save", "load") and cell.transport == "nccl":
        return "b"
    if (cell.fault, cell.phase) == ("cut link", "start"):
        return "d"
    if cell.transport == "threads":
        return {"stop": "c", "sys.exit": "a", "cut link": "d"}.get(cell.fault, "")
    return ""


REASONS = {
    "a": "`sys.exit()` and checkpoints are Python's, where ranks are processes",
    "b": "checkpoints do not use NCCL: ranks on GPUs save and load over shared memory or Gloo",
    "c": "all ranks stop with their process: none is left that could notice",
    "d": "there is no connection: threads have none, and processes none before they meet",
}


def quick() -> list[Cell]:
    """Return the cells of each run of the tests: half of the pairs of a fault and a phase, on transports in turn."""
    chosen = []
    for number, phase in enumerate(PHASES):
        for index, fault in enumerate(FAULTS):
            possible = [cell for cell in (Cell(fault, phase, each) for each in TRANSPORTS) if not impossible(cell)]
            if possible and (number + index) % 2 == 0:
                chosen.append(possible[(number + index) // 2 % len(possible)])
    return chosen
