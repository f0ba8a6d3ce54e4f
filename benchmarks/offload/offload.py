"""Compare the drive tier with what the drive can do: with fio, with the drive alone, and with DeepSpeed's async_io.

Both sides of a case run in turn, round after round. fio and DeepSpeed report their own times, without their time to start.
"""

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fio
import suite

MEBIBYTE = 1 << 20
TILES_OF_A_RUN = 256  # the fewest tiles
DEPTH = 16  # requests in flight for each directory
LAYOUTS = 4  # layouts of files; an even number, so that half of them are in each order
DEEPSPEED = "DeepSpeed async_io"

Side = Callable[[], fio.Sample]


def timed(run: Callable[[], None]) -> fio.Sample:
    """Return the wall-clock time of a run, and the processor time of the whole process."""
    cpu, begin = time.process_time(), time.perf_counter()
    run()
    return fio.Sample(time.perf_counter() - begin, time.process_time() - cpu)


class Tiles(NamedTuple):
    direction: str  # fio's word
    mebibytes: int
    directories: int = 1

    @property
    def name(self) -> str:
        direction = "read and write" if self.direction == "rw" else self.direction
        directories = "" if self.directories == 1 else f", {self.directories} directories"
        return f"{direction} tiles of {self.mebibytes} MiB{directories}"


class Case(NamedTuple):
    """A comparison. It is set up when it runs, so that only one at a time takes space on the drive."""

    name: str
    against: str
    subject: Tiles | str  # tiles vs. fio; else a function of OffloadedUpdate that runs vs. DeepSpeed, or vs. `other`
    other: str = ""

    @property
    def line(self) -> str:
        return f"{self.name}, vs. {self.against}"


TILES = [
    *(Tiles(direction, mebibytes) for direction in ("read", "write") for mebibytes in (1, 4, 16)),
    Tiles("rw", 4),
    *(Tiles(direction, 4, directories) for directories in (2, 4) for direction in ("read", "write")),
]
UPDATE = "adamw split from the drive"
CASES = [
    *(Case(tiles.name, "fio", tiles) for tiles in TILES),
    Case(UPDATE, "drive alone", "pipeline", "drive_alone"),
    Case(UPDATE, "no checksums", "pipeline", "without_seals"),
    Case("tiles read and written", DEEPSPEED, "drive_alone"),
]


def contest(case: Case, gigabytes: float, sides: tuple[Side, Side], rounds: int, renew: Callable[[], None] = lambda: None):
    """Run both sides in turn; return the line of speed, and the line of processor time. `renew` is called three times between
    rounds: the position of a file on the drive changes its speed by up to a tenth, so it makes the files anew, and swaps those
    of the two sides."""
    in_a_row = -(-rounds // LAYOUTS) + 1  # one of them to warm up
    samples = []
    for number in range(LAYOUTS * in_a_row):
        if number and number % in_a_row == 0:
            renew()
        sample = [side() for side in sides]
        if number % in_a_row:
            samples.append(sample)
    sides = [[[sample[side][field] for sample in samples] for side in (0, 1)] for field in (0, 1)]
    rate = lambda seconds: gigabytes / seconds
    return (
        suite.versus(case.name, case.against, "GB/s", *sides[0], value_of=rate),
        suite.versus(f"{case.name}, by CPU time", case.against, "GB/CPU s", *sides[1], value_of=rate),
    )


def versus_fio(case: Case, options: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    from ballast_bench import Stretch

    tiles = case.subject
    directories = [folder / str(number) for number in range(tiles.directories)]
    for directory in directories:
        directory.mkdir()
    tile_bytes = tiles.mebibytes * MEBIBYTE
    # Large tiles move more bytes: the last requests and the start of fio's threads would be much of a short run.
    stretch = Stretch(list(map(str, directories)), max(options.bytes, TILES_OF_A_RUN * tile_bytes), DEPTH)
    job = fio.Job(stretch.files(), tiles.direction, tile_bytes, DEPTH * tiles.directories, stretch.bytes())
    engine = fio.best_engine(job)
    sides = lambda: timed(lambda: stretch.move(tiles.direction, tile_bytes)), lambda: fio.run(job, engine)
    return contest(case._replace(against=f"fio, {engine}"), stretch.bytes() / 1e9, sides, options.rounds)


def update_of(options: argparse.Namespace, folder: Path, ours_is_second: bool = False):
    from ballast_bench import OffloadedUpdate

    return OffloadedUpdate(str(folder), options.bytes, 2 * DEPTH, ours_is_second)


def versus_deepspeed(case: Case, options: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    update = update_of(options, folder)
    command = [sys.executable, Path(__file__).with_name("deepspeed_aio.py"), folder, update.tiles(), update.tile_bytes()]

    def deepspeed() -> fio.Sample:
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if ended.returncode != 0:
            raise SystemExit(f"offload: DeepSpeed's async_io could not be measured:\n{ended.stderr[-2000:]}")
        return fio.Sample(**json.loads(ended.stdout))

    return contest(case, update.gigabytes(), (lambda: timed(update.drive_alone), deepspeed), options.rounds)


def versus(case: Case, options: argparse.Namespace, folder: Path) -> tuple[dict]:
    updates, orders = [update_of(options, folder)], itertools.cycle([True, False])

    def renew() -> None:
        updates.clear()
        for file in folder.iterdir():
            file.unlink()
        updates.append(update_of(options, folder, ours_is_second=next(orders)))

    ours, theirs = (lambda name=name: timed(getattr(updates[0], name)) for name in (case.subject, case.other))
    return contest(case, updates[0].gigabytes(), (ours, theirs), options.rounds, renew)[:1]


def measure(case: Case, options: argparse.Namespace) -> None:
    if case.against == "fio" and not fio.is_installed():
        return print(f"offload: skipped {case.line}: fio is not installed", file=sys.stderr)
    if case.against == DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        return print(f"offload: skipped {case.line}: ./run-benchmarks peers installs it", file=sys.stderr)
    runs = versus_fio if case.against == "fio" else versus_deepspeed if case.against == DEEPSPEED else versus
    with tempfile.TemporaryDirectory(prefix="ballast-benchmark-", dir=options.directory) as folder:
        suite.emit("offload", runs(case, options, Path(folder)))


def main() -> None:
    parser = suite.parser_of("offload", __doc__, directory="a directory on the drive to measure", rounds=12)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="that a run reads or writes (1 GiB; more for large tiles)")
    options = suite.choose(parser, CASES, lambda case: case.line)
    for case in options.cases:
        measure(case, options)


if __name__ == "__main__":
    main()
