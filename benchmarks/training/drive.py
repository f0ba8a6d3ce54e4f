"""The limit that a drive sets: fio with the reads and writes of a step, and the shortest step that this allows."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import fio

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


def floor(work: Work, ranks: int, bytes_per_second: float, without_drive: float, overlappable_share: float) -> float:
    """Return the shortest time of a step in the order that updates need. The share is the part of a step without a drive that
    can overlap with the drive."""
    on_drive, overlappable = ranks * work.bytes / bytes_per_second, overlappable_share * without_drive
    return without_drive - overlappable + max(on_drive, overlappable)


def measure(work: Work, ranks: int, directory: Path) -> float:
    """Return the bytes a second of fio, which reads and writes as the ranks do, with the faster of two engines."""
    with tempfile.TemporaryDirectory(prefix="ballast-fio-", dir=directory) as folder:
        options = fio_options(work, ranks, folder)
        return max(bytes_per_second(fio.report(*options, *fio.ENGINES[engine])) for engine in ("io_uring", "libaio"))


def fio_options(work: Work, ranks: int, folder: str) -> list[str]:
    """Return the options: each rank has a file with two places for each record, and as many records in flight as the engine."""
    size = 2 * max(work.written_bytes // work.record_bytes, work.records) * work.record_bytes
    return [
        *(f"--directory={folder}", "--filename_format=$jobnum", f"--numjobs={ranks}"),
        *("--rw=rw", f"--rwmixread={round(100 * work.read_bytes / work.bytes)}"),
        *(f"--bs={work.record_bytes}", f"--iodepth={work.records}", f"--size={size}"),
        *("--time_based", f"--ramp_time={SETTLING_MILLISECONDS}ms", f"--runtime={MILLISECONDS}ms"),
    ]


def bytes_per_second(job: dict) -> float:
    """Return the sum of both directions in fio's report."""
    return job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
