"""The cases of `ballast bench`: systems with their options, and the model that they train. Start the ranks of a case, each in a
process of its own, and wait for them: no process is left behind."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ballast.checks import refuse

ALONE = "the model alone"
DDP = "DDP"
DRIVE = "DRIVE"  # stands for the directory of the run
LONGEST = 300.0  # seconds of a case
BUSY = 0.1  # the part of the machine's cores that others use, from which on a figure is of a busy machine
PACKAGES = Path(__file__).absolute().parents[3]  # links stay: the extension is next to them, and not to their targets


@dataclass(frozen=True)
class Case:
    """A system, and the options of its call."""

    name: str
    system: str  # a key of ballast.tools.bench.systems.SYSTEMS
    options: Mapping[str, Any] = field(default_factory=dict)
    is_quick: bool = False  # measured with --quick, too
    on_gpu: bool | None = None  # None: on GPUs and on CPUs

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def trains(self) -> bool:
        return self.system != "alone"

    @property
    def is_ballast(self) -> bool:
        return self.system == "ballast"


def _ballast(stage: int, what: str = "", **more: Any) -> Case:
    offload = more.pop("offload", None)
    options = {"stage": stage} | ({} if offload is None else {"offload": offload})
    return Case(f"Ballast stage {stage}{what}", "ballast", options, **more)


ALL_AWAY = {"parameters": "host", "gradients": "host", "state": "host"}
CASES = (
    Case(ALONE, "alone", is_quick=True),
    Case(DDP, "ddp", is_quick=True),
    Case("FSDP2", "fsdp2"),
    Case("DeepSpeed ZeRO 2", "deepspeed", {"stage": 2}),
    Case("DeepSpeed ZeRO 3", "deepspeed", {"stage": 3}),
    _ballast(0),
    _ballast(2),
    _ballast(3, is_quick=True),
    _ballast(2, ", state on the host", offload={"state": "host"}, on_gpu=True, is_quick=True),
    _ballast(3, ", all on the host", offload=ALL_AWAY, on_gpu=True),
    _ballast(3, ", state on the drive", offload=f"nvme:{DRIVE}"),
)


@dataclass(frozen=True)
class Workload:
    """The model and the batch of a rank. A GPT of its own sizes, or the configuration of another model."""

    dtype: str
    sequences: int
    context: int
    seconds: float  # timed steps take about as long
    layers: int
    width: int
    config: Mapping[str, Any] | None = None
    name: str = "GPT"
    reduced: str = ""  # the sizes of the configuration that are smaller than those of the whole model

    @property
    def tokens(self) -> int:
        return self.sequences * self.context


def workload(*, on_gpu: bool, quick: bool, dtype: str | None) -> Workload:
    """Return the small GPT for GPUs or for CPUs."""
    seconds = 1.0 if quick else 4.0
    if on_gpu:
        return Workload(dtype or "bf16", sequences=8, context=1024, seconds=seconds, layers=12, width=1024)
    layers, width = (6, 384) if quick else (8, 512)
    return Workload(dtype or "fp32", sequences=1, context=128, seconds=seconds, layers=layers, width=width)


def select_cases(*, on_gpu: bool, quick: bool, only: Sequence[str]) -> list[Case]:
    """Return the cases to measure: those whose names contain one of the words of `only`, the default ones, or the quick ones.
    The model alone and DDP are always measured, because others are compared with them."""
    missing = "deepspeed" if find_spec("deepspeed") is None else None
    possible = [case for case in CASES if case.on_gpu in (None, on_gpu) and case.system != missing]
    if not only:
        return [case for case in possible if case.is_quick or not quick]
    chosen = [case for case in possible if any(word.lower() in case.name.lower() for word in only)]
    if not chosen:
        names = ", ".join(case.name for case in possible)
        refuse(f"there is no case whose name contains {' or '.join(only)}", needed=f"a part of one of these: {names}")
    return [case for case in possible if case in chosen or case.name in (ALONE, DDP)]


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share."""

    workload: Workload
    ranks: int
    on_gpu: bool
    directory: Path


@dataclass(frozen=True)
class Run:
    """What the ranks of a case measured, or why they failed."""

    ranks: Sequence[Mapping[str, Any]]
    others: float  # the part of the machine's cores that other processes used
    failure: str = ""

    @property
    def busy(self) -> bool:
        return self.others > BUSY


def run_case(case: Case, of: Setting) -> Run:
    """Run a case. A failure of one rank ends the others, and so does an interrupt."""
    with tempfile.TemporaryDirectory(prefix="ballast-bench-", dir=of.directory) as folder:
        began, used, busy = time.monotonic(), _seconds_of_children(), _busy_seconds()
        task = Path(folder) / "task"
        task.write_text(json.dumps(_task(case, of, folder)))
        port = free_port()
        running: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(of.ranks):
                running.append(_start(task, rank, of.ranks, port))
            failure = _wait(running, task)
        finally:
            _end(running)
        wall = time.monotonic() - began
        others = _part_of_others(wall, _seconds_of_children() - used, _busy_seconds() - busy)
        ranks = [] if failure else [json.loads(Path(f"{task}.{rank}").read_text()) for rank in range(of.ranks)]
        return Run(ranks, others, failure)


def _task(case: Case, of: Setting, folder: str) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = max(1, len(cores) // of.ranks)
    parts = [] if of.on_gpu else [cores[rank * each % max(1, len(cores)) :][:each] for rank in range(of.ranks)]
    return {
        "system": case.system,
        "options": dict(case.options),
        "workload": asdict(of.workload),
        "directory": folder,
        "on_gpu": of.on_gpu,
        "cores": parts,
        "parent": os.getpid(),
    }


def start_rank(command: Sequence[str | Path], rank: int, ranks: int, port: int, **options: Any) -> subprocess.Popen[Any]:
    """Start a rank of a job on this machine, with the environment that torchrun would give it. `options` are those of Popen;
    `env` adds to the environment of this process."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in launched.items()} | {"MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(command, env=environment | options.pop("env", {}), **options)


def _start(task: Path, rank: int, ranks: int, port: int) -> subprocess.Popen[Any]:
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(f"{task}.{rank}.log", "wb") as log:
        return start_rank(
            [sys.executable, "-m", "ballast.tools.bench.rank", str(task)],
            rank,
            ranks,
            port,
            env={"PYTHONPATH": os.pathsep.join(paths)},
            cwd=task.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(running: Sequence[subprocess.Popen[Any]], task: Path) -> str:
    """Wait until all ranks have ended; return why one failed, or nothing."""
    end = time.monotonic() + LONGEST
    while True:
        codes = [process.poll() for process in running]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            lines = Path(f"{task}.{failed}.log").read_text(errors="replace").strip().splitlines()
            return f"rank {failed} ended with {codes[failed]}: {lines[-1] if lines else 'it printed nothing'}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > end:
            return f"it did not end within {LONGEST:.0f} s"
        time.sleep(0.02)


def _end(running: Sequence[subprocess.Popen[Any]]) -> None:
    for process in running:
        process.kill()
    for process in running:
        process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _busy_seconds() -> float:
    """Return the seconds that the cores of the machine worked, added up; 0 where the system does not tell."""
    try:
        words = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    ticks = [int(word) for word in words]
    working = sum(ticks) - ticks[3] - ticks[4]  # all but cores that are idle, and those that wait for a drive
    return working / os.sysconf("SC_CLK_TCK")


def _part_of_others(wall: float, own: float, busy: float) -> float:
    """Return the part of the machine's cores that other processes used.

    >>> _part_of_others(wall=10.0, own=12.0, busy=17.0) * (os.cpu_count() or 1)
    0.5
    """
    return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))
