"""Measures what grows with the number of ranks: start, steps, memory, descriptors, files, and the end after a rank has died.

Each rank is a process with a tiny model, so most of what it takes is the cost of being a rank.
"""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import suite
from ballast.tools.bench.cases import free_port

RANKS = (4, 16, 64, 128, 256)
STEPS = 10
LONG = 1000000  # steps that do not end before the rank is killed

TRANSPORTS = {"shared memory": (), "Gloo": ("--gloo",)}
MOST_GLOO = 64  # each pair of ranks has connections of its own, and one machine has the ends of all of them
CASES = [(ranks, name) for name in TRANSPORTS for ranks in RANKS if name != "Gloo" or ranks <= MOST_GLOO]


class Job:
    """Processes of rank.cpp, which train a tiny model. Use it as a context: no process is left behind."""

    def __init__(self, program: str, ranks: int, steps: int, options: Sequence[str] = ()):
        self.begin = time.monotonic()
        port = {"BALLAST_PORT": str(free_port())}
        self.ranks = suite.start_ranks(
            ranks,
            lambda rank: [program, str(steps), *options],
            lambda rank: {
                "env": port,
                "stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                "stderr": subprocess.PIPE,
                "text": True,
            },
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()

    def until(self, event: str) -> float:
        """Return the seconds from the start of the processes until rank 0 reports this event."""
        for line in self.ranks[0].stdout:
            if line.strip() == event:
                return time.monotonic() - self.begin
        raise RuntimeError(f'rank 0 ended before "{event}": {self.ranks[0].stderr.read()}')

    def end(self) -> float:
        """Return the seconds until all ranks have ended well."""
        codes = [rank.communicate() and rank.returncode for rank in self.ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with the exit codes {sorted(set(codes))}")
        return time.monotonic() - self.begin

    def kill(self, rank: int) -> tuple[float, int]:
        """Kill a rank. Return the seconds until all others have ended, and how many of them name it."""
        begin = time.monotonic()
        self.ranks[rank].send_signal(signal.SIGKILL)
        errors = [other.communicate()[1] for number, other in enumerate(self.ranks) if number != rank]
        return time.monotonic() - begin, sum(f"rank {rank} " in error for error in errors)

    def proportional_bytes(self, rank: int) -> int:
        """Return the memory of a rank, in which shared pages count in proportion."""
        text = Path(f"/proc/{self.ranks[rank].pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024

    def descriptors(self, rank: int) -> int:
        return len(os.listdir(f"/proc/{self.ranks[rank].pid}/fd"))

    def processor_seconds(self, rank: int) -> float:
        fields = Path(f"/proc/{self.ranks[rank].pid}/stat").read_text().rpartition(")")[2].split()
        return max(1, int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # a few ranks take less than a tick


def case_of(case: tuple[int, str]) -> str:
    return f"{case[0]} ranks, {case[1]}"


def measure(program: str, ranks: int, transport: str) -> dict[str, tuple[float, str]]:
    """Return values with their units, by name."""
    options = TRANSPORTS[transport]
    with Job(program, ranks, STEPS, options) as job:
        connected = job.until("connected")
        first = job.until("first step")
        all_steps = job.end()
    with Job(program, ranks, LONG, options) as job:
        job.until("first step")
        figures = {
            "connected": (connected, "s"),
            "connected, a rank": (1e3 * connected / ranks, "ms"),
            "first step after that, a rank": (1e3 * (first - connected) / ranks, "ms"),
            "further step, a rank": (1e3 * (all_steps - first) / (STEPS - 1) / ranks, "ms"),
            "memory of rank 0": (job.proportional_bytes(0) / 2**20, "MiB"),
            "memory of the last rank": (job.proportional_bytes(ranks - 1) / 2**20, "MiB"),
            "descriptors of rank 0": (job.descriptors(0), ""),
            "descriptors of the last rank": (job.descriptors(ranks - 1), ""),
            "processor time of rank 0 vs. the last": (job.processor_seconds(0) / job.processor_seconds(ranks - 1), "x"),
        }
        seconds, named = job.kill(ranks // 2)
    if named < ranks - 1:
        raise RuntimeError(f"only {named} of {ranks - 1} ranks name the rank that died")
    return figures | {"end after a rank has died": (seconds, "s")}


def measure_files(program: str, ranks: int, folder: Path) -> dict[str, tuple[float, str]]:
    """Return milliseconds a rank, of a run and a checkpoint in a directory that all ranks see."""

    def seconds_between(number: int, *events: str) -> list[float]:
        with Job(program, number, 1, ("--keep", str(folder))) as job:
            at = [job.until(event) for event in ("connected", "started", *events)]
            job.end()
        return [later - earlier for earlier, later in zip(at, at[1:])]

    begins, _, saves = seconds_between(ranks, "first step", "saved")
    resumes, loads = seconds_between(ranks, "loaded")
    adopts, reshards = seconds_between(ranks * 3 // 4, "loaded")
    seconds = {"begin a run": begins, "save": saves, "resume": resumes, "load": loads}
    seconds |= {"resume on three quarters": adopts, "load on three quarters": reshards}
    return {f"{name}, a rank": (1e3 * value / ranks, "ms") for name, value in seconds.items()}


def main() -> None:
    parser = suite.parser_of("ranks", __doc__, directory="where runs and checkpoints are kept")
    parser.add_argument("--program", required=True, help="a rank, of rank.cpp")
    options = suite.choose(parser, CASES, case_of)
    for case in options.cases:
        figures = measure(options.program, *case)
        if case[1] != "Gloo":
            with tempfile.TemporaryDirectory(prefix="ballast-ranks-", dir=options.directory) as folder:
                figures |= measure_files(options.program, case[0], Path(folder))
        suite.emit("ranks", (suite.line(f"{case_of(case)}: {name}", *figure) for name, figure in figures.items()))


if __name__ == "__main__":
    main()
