"""The limit that a drive sets: fio with the reads and writes of a step, and the shortest step that this allows."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

ENGINES = (["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"], ["--ioengine=libaio"])
SETTLING_MILLISECONDS = 500  # this time is not counted
MILLISECONDS = 2000


class Work(NamedTuple):
    """The bytes that one rank reads and writes in a step."""

    read_bytes: int
    written_bytes: int
    record_bytes: int  # read or written at a time
    records: int  # records in flight at once

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes


class Floor(NamedTuple):
    """The shortest time of a step."""

    drive_seconds: float
    without_drive_seconds: float
    overlappable_seconds: float  # the part of a step without a drive that can overlap with the drive

    @property
    def overlapped_seconds(self) -> float:
        """The shortest time if everything could overlap."""
        return max(self.drive_seconds, self.without_drive_seconds)

    @property
    def seconds(self) -> float:
        """The shortest time in the order that updates need."""
        return self.without_drive_seconds - self.overlappable_seconds + max(self.drive_seconds, self.overlappable_seconds)


def floor(work: Work, ranks: int, bytes_per_second: float, without_drive_seconds: float, overlappable_share: float) -> Floor:
    drive_seconds = ranks * work.bytes / bytes_per_second
    return Floor(drive_seconds, without_drive_seconds, overlappable_share * without_drive_seconds)


def has_fio() -> bool:
    return shutil.which("fio") is not None


def measure(work: Work, ranks: int, directory: Path) -> float:
    """Return the bytes a second of fio, which reads and writes as the ranks do, with the faster of its two engines."""
    with tempfile.TemporaryDirectory(prefix="ballast-fio-", dir=directory) as folder:
        return max(bytes_per_second(run_fio(fio_command(work, ranks, engine, folder))) for engine in ENGINES)


def fio_command(work: Work, ranks: int, engine: list[str], folder: str) -> list[str]:
    """Return the command: each rank has a file with two places for each record, and as many records in flight as the engine."""
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
    # fio's buffers are in huge pages, as Ballast's are: drives take fewer and longer requests from them.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"training: fio failed: {' '.join(command)}\n{run.stderr}")
    return run.stdout


def bytes_per_second(report: str) -> float:
    """Return the sum of both directions in fio's report, which may begin with warnings."""
    job = json.loads(report[report.index("{") :])["jobs"][0]
    return job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
