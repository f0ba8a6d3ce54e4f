"""A job of many ranks on this machine: processes of rank.cpp, which train a tiny model."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import suite


class Job:
    """Use it as a context: no process is left behind."""

    def __init__(self, program: str, ranks: int, steps: int, options: Sequence[str] = ()):
        self.begin = time.monotonic()
        environment = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "BALLAST_PORT": str(suite.free_port()),
        }
        self.ranks = [
            subprocess.Popen(
                [program, str(steps), *options],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

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
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
