"""The faults of the soak: what each does to a running job, and how it is taken back."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soak.records import flip_idle_bit

TIMEOUT = 5  # seconds that a rank waits for others
SMALL = 16 << 10  # bytes: a log fits, a record does not


@dataclass
class Job:
    """A running torchrun and its ranks."""

    folder: Path
    process: subprocess.Popen[bytes]
    random: random.Random

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks that live."""
        found = {}
        for file in (self.folder / "pids").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(file.read_text())
                if str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    found[int(file.name)] = pid
        return found

    def send(self, signal_number: int) -> str:
        rank, pid = self.random.choice(sorted(self.pids().items()))
        os.kill(pid, signal_number)
        return f"rank {rank}"


def kill(job: Job) -> str:
    return job.send(signal.SIGKILL)


def terminate(job: Job) -> str:
    return job.send(signal.SIGTERM)


def stop(job: Job) -> str:
    rank, pid = job.random.choice(sorted(job.pids().items()))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT + 3)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return f"rank {rank}"


def raise_an_error(job: Job) -> str:
    return order(job, "raise")


def leave(job: Job) -> str:
    return order(job, "exit")


def order(job: Job, words: str) -> str:
    rank = job.random.choice(sorted(job.pids()))
    new = job.folder / "order"
    new.write_text(words)
    new.rename(job.folder / f"order-{rank}")
    return f"rank {rank}"


def limit_files(job: Job) -> str:
    return limit(job, resource.RLIMIT_FSIZE, SMALL)


def limit_descriptors(job: Job) -> str:
    return limit(job, resource.RLIMIT_NOFILE, 3)


def limit(job: Job, what: int, soft: int) -> str:
    rank, pid = job.random.choice(sorted(job.pids().items()))
    resource.prlimit(pid, what, (soft, resource.prlimit(pid, what)[1]))
    return f"rank {rank}"


def fill_drive(job: Job) -> str:
    filler = job.folder / "checkpoints" / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    ranks = job.pids()
    until = time.monotonic() + 10
    while job.pids() == ranks and time.monotonic() < until:
        time.sleep(0.1)
    filler.unlink()
    return "the drive of the checkpoints"


def lose_host(job: Job) -> str:
    """Kill torchrun and all of its ranks at once."""
    job.process.kill()
    for pid in job.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return "all ranks and torchrun"


def flip_bit(job: Job) -> str:
    lose_host(job)
    job.process.wait()
    while job.pids():
        time.sleep(0.05)
    return flip_idle_bit(job.folder / "records", job.random)


FAULTS: dict[str, Callable[[Job], str]] = {
    "SIGKILL": kill,
    "SIGTERM": terminate,
    "SIGSTOP for longer than the timeout": stop,
    "an exception in the training": raise_an_error,
    "sys.exit(3)": leave,
    "a limit of file sizes, as of a full drive": limit_files,
    "no descriptors left": limit_descriptors,
    "a full drive of checkpoints": fill_drive,
    "all ranks and torchrun killed": lose_host,
    "all of them killed, and a bit flipped in an idle record": flip_bit,
}
NEEDS_ROOT = "a full drive of checkpoints"
