"""fio, which measures the limit of a drive."""

import json
import os
import shutil
import subprocess
from typing import NamedTuple

COMMON = ("--name=job", "--direct=1", "--overwrite=1", "--scramble_buffers=0", "--group_reporting", "--output-format=json")
ENGINES = {
    "io_uring": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
    "libaio": ("--ioengine=libaio",),
    "threads": ("--ioengine=psync", "--thread=1"),
}


class Sample(NamedTuple):
    seconds: float
    cpu_seconds: float


class Job(NamedTuple):
    """Tiles that are moved once."""

    files: list[str]
    direction: str  # "read", "write" or "rw"
    block_bytes: int
    depth: int
    bytes: int  # bytes of all files together


def is_installed() -> bool:
    return shutil.which("fio") is not None


def report(*options: str) -> dict:
    """Run fio, and return its report of the job."""
    command = ["fio", *COMMON, *options]
    # fio's buffers are in huge pages, as Ballast's are: drives take fewer and longer requests from them.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"fio failed: {' '.join(command)}\n{ended.stderr}")
    return job_of(ended.stdout)


def job_of(output: str) -> dict:
    """Return the report in fio's output, which may begin with warnings."""
    return json.loads(output[output.index("{") :])["jobs"][0]


def run(job: Job, engine: str) -> Sample:
    """Threads have one request each, and share the work: each has its own part of the files."""
    jobs, depth = (job.depth, 1) if engine == "threads" else (1, job.depth)
    each = job.bytes // jobs
    work = [f"--numjobs={jobs}", f"--iodepth={depth}", f"--size={each}", f"--offset_increment={each // len(job.files)}"]
    files = [f"--filename={':'.join(job.files)}", f"--rw={job.direction}", f"--bs={job.block_bytes}"]
    ran = report(*files, *work, *ENGINES[engine], "--allow_file_create=0", "--fallocate=none")
    directions = (ran["read"], ran["write"])
    scale = job.bytes / sum(each["io_bytes"] for each in directions)
    seconds = scale * max(each["runtime"] for each in directions) / 1000  # fio gives whole milliseconds
    cpu = seconds * jobs * (ran["usr_cpu"] + ran["sys_cpu"]) / 100
    return Sample(seconds, max(cpu, 1e-6))  # it may be 0 in a short run, by whose time others are divided


def best_engine(job: Job) -> str:
    """Return fio's fastest engine for the job on this machine."""
    return min(ENGINES, key=lambda engine: min(run(job, engine).seconds for _ in range(2)))
