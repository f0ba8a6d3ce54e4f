"""What a drive allows: fio with a step's reads and writes, and the floor that this sets to the step's seconds."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

ENGINES = (["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"], ["--ioengine=libaio"])
SETTLING_MILLISECONDS = 500  # not counted
MILLISECONDS = 2000


class Work(NamedTuple):
    """Of one rank, in a step."""

    read_bytes: int
    written_bytes: int
    record_bytes: int  # read or written at a time
    records: int  # in memory at once, on their way

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes


class Floor(NamedTuple):
    """What a step takes no less than."""

    drive_seconds: float
    without_drive_seconds: float
    beside_seconds: float  # of those without, beside which the drive can work

    @property
    def overlapped_seconds(self) -> float:
        """If all of the two could overlap."""
        return max(self.drive_seconds, self.without_drive_seconds)

    @property
    def seconds(self) -> float:
        """In the order that updates have to come in."""
        return self.without_drive_seconds - self.beside_seconds + max(self.drive_seconds, self.beside_seconds)


def floor(work: Work, ranks: int, bytes_per_second: float, without_drive_seconds: float, share_beside: float) -> Floor:
    drive_seconds = ranks * work.bytes / bytes_per_second
    return Floor(drive_seconds, without_drive_seconds, share_beside * without_drive_seconds)


def has_fio() -> bool:
    return shutil.which("fio") is not None


def measure(work: Work, ranks: int, directory: Path) -> float:
    """Bytes a second that fio reads and writes as the ranks do, with the engine that is the faster one just now."""
    with tempfile.TemporaryDirectory(prefix="ballast-fio-", dir=directory) as folder:
        return max(bytes_per_second(run_fio(fio_command(work, ranks, engine, folder))) for engine in ENGINES)


def fio_command(work: Work, ranks: int, engine: list[str], folder: str) -> list[str]:
    """Each rank has a file, in which each of its records has two places, and all records that it has on their way."""
    size = 2 * max(work.written_bytes // work.record_bytes, work.records) * work.record_bytes
    return [
        *("fio", "--name=rank", f"--directory={folder}", "--filename_format=$jobnum", f"--numjobs={ranks}"),
        *("--rw=rw", f"--rwmixread={round(100 * work.read_bytes / work.bytes)}"),
        *(f"--bs={work.record_bytes}", f"--iodepth={work.records}", f"--size={size}"),
        *("--direct=1", "--overwrite=1", "--scramble_buffers=0", *engine),
        *("--time_based", f"--ramp_time={SETTLING_MILLISECONDS}ms", f"--runtime={MILLISECONDS}ms"),
        *("--group_reporting", "--output-format=json"),
    ]


def run_fio(command: list[str]) -> str:
    # Huge pages under its buffers, as ours have: drives take fewer and longer requests from them.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"training: fio failed: {' '.join(command)}\n{run.stderr}")
    return run.stdout


def bytes_per_second(report: str) -> float:
    """Of fio's report, before which warnings may stand."""
    job = json.loads(report[report.index("{") :])["jobs"][0]
    return job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
