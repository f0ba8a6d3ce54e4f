"""Measure how far apart ranks with state on one drive end their updates: with turns, as in every training, and without.

The drive is a loop device. Needs root, 6 GB in the directory, and control groups of version 1 or 2 with block I/O.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import suite
from control_group import ControlGroup

RANKS = 4
UNITS, MILLION_ELEMENTS = 8, 16  # 1.5 GiB of state, read and written in each step
IMAGE_BYTES = 6 << 30
LIMIT = 500_000_000  # bytes a second in each direction
CASES = {"one limit": "none", "queues": "bfq"}  # with the scheduler of the device


@contextlib.contextmanager
def loop_device(directory: Path, scheduler: str) -> Iterator[tuple[str, Path]]:
    """Yield the number of a loop device and where it is mounted: in a namespace of this process, where no other can keep it."""
    with tempfile.TemporaryDirectory(prefix="ballast-shared-drive-", dir=directory) as folder:
        image, mounted = Path(folder) / "image", Path(folder) / "mounted"
        mounted.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, IMAGE_BYTES)
        said = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", image], check=True, capture_output=True, text=True
        )
        device = Path(said.stdout.strip())
        try:
            subprocess.run(["mkfs.ext4", "-q", device], check=True)
            Path(f"/sys/block/{device.name}/queue/scheduler").write_text(scheduler)
            subprocess.run(["mount", device, mounted], check=True)
            try:
                yield Path(f"/sys/block/{device.name}/dev").read_text().strip(), mounted
            finally:
                subprocess.run(["umount", mounted], check=True)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


def measure(program: str, case: str, directory: Path, steps: int) -> dict[bool, list[tuple[float, float]]]:
    """Return the seconds of the first and the last rank in each step, by whether ranks took turns."""
    alone, rest = (ControlGroup(name, "blkio", "io") for name in ("alone", "rest"))
    with alone, rest, loop_device(directory, CASES[case]) as (device, mounted):
        if case == "one limit":
            alone = rest
            first = {f"blkio.throttle.{kind}_bps_device": f"{device} {LIMIT}" for kind in ("read", "write")}
            rest.limit(first, {"io.max": f"{device} rbps={LIMIT} wbps={LIMIT}"})
        command = [program, str(steps), "--share", str(mounted), str(UNITS), str(MILLION_ELEMENTS)]
        pipe = {"stdout": subprocess.PIPE, "text": True}
        own = lambda rank: {**pipe, "preexec_fn": (rest if rank > 0 else alone).enter}
        ranks = suite.start_ranks(RANKS, lambda rank: command, own)
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("shared-drive: a rank failed")
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for line in said[0].splitlines()[2:]:  # the first of each kind is not counted
        turns, first, last = line.split()
        seconds[turns == "1"].append((float(first), float(last)))
    return seconds


def rows_of(case: str, seconds: dict[bool, list[tuple[float, float]]]) -> list[dict]:
    last = [[last for _, last in seconds[turns]] for turns in (True, False)]
    apart = [[last / first for first, last in seconds[turns]] for turns in (True, False)]
    worst = [[max(each)] for each in apart]
    measures = {"updates of the last rank": last, "last rank vs. the first": apart, "the same, worst step": worst}
    units = ("s", "x", "x")
    return [
        suite.versus(f"{case}: {name}", "without turns", unit, *sides) for (name, sides), unit in zip(measures.items(), units)
    ]


def main() -> None:
    parser = suite.parser_of("shared-drive", __doc__, directory="where the loop device's file lies")
    parser.add_argument("--program", required=True, help="a rank, of rank.cpp")
    parser.add_argument("--steps", type=int, default=32, help="half of them with turns (%(default)s)")
    options = suite.choose(parser, list(CASES), str)
    for case in options.cases:
        suite.emit("shared-drive", rows_of(case, measure(options.program, case, options.directory, options.steps)))


if __name__ == "__main__":
    main()
