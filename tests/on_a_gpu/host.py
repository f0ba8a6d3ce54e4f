"""Measure the host: grow its memory, stream through it with all cores, and write and read its drive past the page cache."""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from on_a_gpu.findings import figures_line

GIB = 1 << 30
PIECE = 4 * GIB  # some virtual machines give memory as it is used: all at once may be refused
BLOCK = 8 << 20
WRITERS = 4
ROUNDS = 5


def grow(wanted: int, piece: int = PIECE) -> int:
    """Use this much memory, piece by piece, and free it. Return how much there was."""
    import torch

    pieces: list[Any] = []
    while len(pieces) * piece < wanted and has_room(piece + GIB):
        pieces.append(torch.empty(piece // 8, dtype=torch.int64).fill_(1))  # on all cores
    return len(pieces) * piece


def has_room(count: int) -> bool:
    """Tell whether so much memory is there, or comes within two seconds where it grows."""
    for _ in range(20):
        if memory_of_kernel("MemAvailable") > count:
            return True
        time.sleep(0.1)
    return False


def memory_of_kernel(name: str) -> int:
    """Return a size in bytes by its name in /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) << 10


def stream(count: int) -> float:
    """Return GB/s of a = b + 3 c on all cores: the bytes that are read and written, without those that a cache line brings."""
    import torch

    b, c = (torch.full((count,), value) for value in (1.0, 2.0))
    a = torch.empty(count)
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        torch.add(b, c, alpha=3, out=a)
        times.append(time.perf_counter() - began)
    assert a[0].item() == 7
    return 3 * 4 * count / median(times[1:]) / 1e9


def drive(folder: Path, count: int) -> dict[str, float]:
    """Return GB/s of writes, ended by a flush, and of reads of a file, in blocks that do not go through the page cache."""
    path = folder / "raw"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    memory = [mmap.mmap(-1, BLOCK) for _ in range(WRITERS)]
    for each in memory:
        each.write(os.urandom(BLOCK))

    def all_blocks(move: Callable[[mmap.mmap, int], int], end: Callable[[], None]) -> float:
        def some(thread: int) -> None:
            for first in range(thread * BLOCK, count, WRITERS * BLOCK):
                move(memory[thread], first)

        began = time.perf_counter()
        with ThreadPoolExecutor(WRITERS) as threads:
            list(threads.map(some, range(WRITERS)))
        end()
        return count / (time.perf_counter() - began) / 1e9

    try:
        written = all_blocks(lambda block, first: os.pwrite(file, block, first), lambda: os.fsync(file))
        read = all_blocks(lambda block, first: os.preadv(file, [block], first), lambda: None)
    finally:
        os.close(file)
        path.unlink()
    return {"write": written, "read": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["memory", "drive"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gib", type=float, required=True, help="the memory to grow to, or the size of the file")
    given = parser.parse_args()
    size = int(given.gib * GIB)
    if given.what == "drive":
        given.work.mkdir(parents=True, exist_ok=True)
        rates = drive(given.work, size // BLOCK * BLOCK)
        print(figures_line("drive", rates))
        print(f"== drive: {rates['write']:.2f} GB/s written, {rates['read']:.2f} GB/s read, past the page cache")
        return
    began = time.perf_counter()
    grown = grow(size, min(PIECE, size))
    seconds = time.perf_counter() - began
    rate = stream(min(size // 12, 1 << 28))
    cores = len(os.sched_getaffinity(0))
    print(figures_line("host", {"grown_bytes": grown, "seconds": seconds, "stream": rate, "cores": cores}))
    print(f"== host memory: {grown / GIB:.0f} GiB used after {seconds:.1f} s; {rate:.0f} GB/s on {cores} cores")


if __name__ == "__main__":
    main()
