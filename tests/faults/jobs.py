"""Runs the ranks of a cell, in C++ or in Python, and says how each has ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

from faults.matrix import RANKS, TIMEOUT, Cell

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
BOUND = TIMEOUT + 5  # seconds after the fault in which all other ranks have ended
START = 60  # seconds until the fault, on a busy machine


class Ended(NamedTuple):
    status: int
    said: str


class Ranks:
    """Starts programs that fork ranks. Python's is started once: it has imported torch."""

    def __init__(self) -> None:
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()

    def run(self, cell: Cell, fault: str, folder: Path) -> tuple[list[Ended], list[str]]:
        """Run all ranks to their end. Return how they have ended, and what should not have happened on the way."""
        for file in folder.iterdir():
            if file.suffix in (".pid", ".err", ".planted"):
                file.unlink()
        with self._answers(cell, fault, folder) as answers:
            problems = wait_for_end(cell, fault, folder)
            end(folder)
            answer = answers.readline()
        statuses = json.loads(answer) if answer else [-signal.SIGKILL] * RANKS  # the ranks were threads of the program
        said = [(folder / f"{rank}.err") for rank in range(RANKS)]
        words = [each.read_text(errors="replace") if each.exists() else "" for each in said]
        return [Ended(*each) for each in zip(statuses, words, strict=True)], problems

    def _answers(self, cell: Cell, fault: str, folder: Path) -> contextlib.AbstractContextManager[IO[str]]:
        arguments = [cell.transport, cell.phase, fault, str(cell.victim), str(folder)]
        if cell.in_python:
            return self._in_python(arguments, folder)
        return in_cpp(arguments, folder)

    @contextlib.contextmanager
    def _in_python(self, arguments: list[str], folder: Path) -> Iterator[IO[str]]:
        server = self._python
        assert server.stdin is not None and server.stdout is not None
        environment = {"PLANTED": str(BUILD / "tests" / "libballast_planted.so"), **rendezvous(folder)}
        script = str(Path(__file__).with_name("rank.py"))
        job = {"script": script, "arguments": arguments, "ranks": RANKS, "leaver": 0, "folder": str(folder)}
        server.stdin.write(json.dumps({**job, "environment": environment}) + "\n")
        server.stdin.flush()
        yield server.stdout

    @cached_property
    def _python(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "python" / "wrap" / "support" / "program_ends.py")]
        environment = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._servers.append(subprocess.Popen(command, env=environment, start_new_session=True, text=True, **pipes))
        return self._servers[0]


@contextlib.contextmanager
def in_cpp(arguments: list[str], folder: Path) -> Iterator[IO[str]]:
    command = [str(BUILD / "tests" / "fault_cell"), *arguments]
    environment = {**os.environ, **rendezvous(folder)}
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    yield program.stdout
    program.communicate()


def rendezvous(folder: Path) -> dict[str, str]:
    where = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "BALLAST_PORT": free_port()}
    return {**where, "TMPDIR": str(folder / "tmp")}


def wait_for_end(cell: Cell, fault: str, folder: Path) -> list[str]:
    """Wait until all ranks but a stopped one have ended. Pauses that last longer than asked for do not count in full: ranks get
    no processor either then."""
    left = float(START)
    planted = folder / f"{cell.victim}.planted"
    while left > 0:
        began = time.monotonic()
        time.sleep(0.02)
        left -= min(time.monotonic() - began, 0.03)
        if fault != "none" and planted.exists():
            left = min(left, BOUND)
            planted.unlink()
            fault = "none" if fault != "stop" else fault
        alive = [rank for rank, pid in pids(folder).items() if lives(pid)]
        if len(pids(folder)) == RANKS and all(rank == cell.victim and fault == "stop" for rank in alive):
            return []
    late = [rank for rank, pid in pids(folder).items() if lives(pid) and not (rank == cell.victim and fault == "stop")]
    return [f"ranks {late} have not ended {BOUND} s after the fault" if late else f"only {len(pids(folder))} ranks began"]


def end(folder: Path) -> None:
    for pid in pids(folder).values():
        if lives(pid):
            with contextlib.suppress(ProcessLookupError):  # it may end just now
                os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> dict[int, int]:
    found = {}
    for file in folder.glob("*.pid"):
        with contextlib.suppress(ValueError):  # it is being written
            found[int(file.stem)] = int(file.read_text())
    return found


def lives(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> str:
    """Return the first of three free ports: a rank that wraps twice needs two. Other connections get none below 32768."""
    while True:
        first = random.randrange(20000, 32000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + 3):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return str(first)
