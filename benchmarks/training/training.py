"""Measure the memory and throughput of one Llama in all stages and tiers, in turn with the configurations to compare with."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import drive
import fio
import suite


class Case(NamedTuple):
    name: str
    options: tuple[str, ...]  # the options of the trainer
    against: str  # the name of another case
    ranks: int = 2

    @property
    def on_drive(self) -> bool:
        return "nvme" in self.options

    @property
    def overlaps_with(self) -> str:
        """The part of a step during which the drive can work. Updates come after the backward pass, or in it, and before the
        next forward pass. Parameters are read at any time."""
        if "--parameters" in self.options:
            return "all"
        if "--wait-for-updates" in self.options:
            return "nothing"
        return "backward" if "--update-in-backward" in self.options else "forward"


def case(name: str, options: str, against: str, ranks: int = 2) -> Case:
    return Case(name, tuple(options.split()), against, ranks)


RESIDENT = "stage 0"
STAGE_3 = "stage 3"
STATE_ON_HOST = "stage 3, state on the host"
STATE_ON_DRIVE = "stage 3, state on the drive"
RUN = "stage 3, a run on the drive"
ALL_ON_DRIVE = "stage 3, all on host and drive"
ALONE = "one rank, resident"
ALONE_8 = "one rank, resident, 8 micro-steps"
BY_MICRO_STEPS = "one rank, all on host and drive, 8 micro-steps"

_ON_DRIVE = "--stage 3 --state nvme"
_LITTLE_RESIDENT = "--stage 3 --parameters nvme --gradients host --state nvme"
_ALL = f"{_LITTLE_RESIDENT} --prefetch 2"

CASES = [
    case(RESIDENT, "--stage 0", RESIDENT),
    case("stage 1", "--stage 1", RESIDENT),
    case("stage 2", "--stage 2", RESIDENT),
    case(STAGE_3, "--stage 3", RESIDENT),
    case("stage 3, without prefetching", "--stage 3 --prefetch 0", STAGE_3),
    case(STATE_ON_HOST, "--stage 3 --gradients host --state host", STAGE_3),
    case("stage 3, all on the host", "--stage 3 --parameters host --gradients host --state host", STAGE_3),
    case(STATE_ON_DRIVE, _ON_DRIVE, STAGE_3),
    case(f"{STATE_ON_DRIVE}, steps waited for", f"{_ON_DRIVE} --wait-for-updates", STATE_ON_DRIVE),
    case(f"{STATE_ON_DRIVE}, updated in backward", f"{_ON_DRIVE} --update-in-backward", STATE_ON_DRIVE),
    case(f"{STATE_ON_DRIVE}, compact", f"{_ON_DRIVE} --state-format compact", STATE_ON_DRIVE),
    case(RUN, f"{_ON_DRIVE} --run kept", STATE_ON_DRIVE),
    case(f"{RUN}, mirrored", f"{_ON_DRIVE} --run kept --mirror", RUN),
    case(ALL_ON_DRIVE, _ALL, STATE_ON_DRIVE),
    case(f"{ALL_ON_DRIVE}, without prefetching", f"{_LITTLE_RESIDENT} --prefetch 0", ALL_ON_DRIVE),
    case(f"{ALL_ON_DRIVE}, updated in backward", f"{_ALL} --update-in-backward", ALL_ON_DRIVE),
    case(ALONE, "--stage 0", ALONE, ranks=1),
    case("one rank, state on the drive", _ON_DRIVE, ALONE, ranks=1),
    case("one rank, state on the drive, updated in backward", f"{_ON_DRIVE} --update-in-backward", ALONE, ranks=1),
    case("one rank, all on host and drive", _ALL, ALONE, ranks=1),
    case(ALONE_8, "--stage 0 --micro-steps 8", ALONE_8, ranks=1),
    case(BY_MICRO_STEPS, f"{_ALL} --micro-steps 8", ALONE_8, ranks=1),
    case(f"{BY_MICRO_STEPS}, by layers", f"{_ALL} --micro-steps 8 --layer-major", BY_MICRO_STEPS, ranks=1),
]


class Run(NamedTuple):
    """The time and memory of a configuration in one run: medians of its steps, on rank 0."""

    seconds: float
    tokens_per_second: float
    forecast_seconds: float
    forward_share: float  # the share of a step's arithmetic, without updates
    bytes: dict[str, int]  # the bytes of each tier: reserved, and activations
    exposed_seconds: dict[str, float]  # the exposed seconds of each phase
    resident_bytes: int  # the peak of the largest process
    work: drive.Work | None  # the work on the drive
    drive_rate: float  # bytes a second of fio with the same work, just after


Runs = dict[str, list[Run]]  # of each round, by case


def command(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command of a rank, whose drive is this folder."""
    shape = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "heads", "context", "batch", "steps")]
    threads = max(1, len(os.sched_getaffinity(0)) // case.ranks)
    on_drive = ["--drive", str(folder)] if case.on_drive else []
    return [options.program, *shape, *case.options, *on_drive, "--threads", str(threads), "--forecast"]


def run_once(case: Case, options: argparse.Namespace) -> Run:
    with tempfile.TemporaryDirectory(prefix="ballast-training-", dir=options.directory) as folder:
        drives = [Path(folder, str(rank)) for rank in range(case.ranks)]
        for each in drives:
            each.mkdir()
        ranks = suite.start_ranks(
            case.ranks,
            lambda rank: command(case, options, drives[rank]),
            lambda rank: {"stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL},
        )
        steps = [json.loads(line) for line in ranks[0].stdout]
        resident = max(suite.end_of(rank) for rank in ranks)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"training: a rank of '{case.name}' failed; its error is above")
    work = drive.Work(**steps[0]["drive"]) if "drive" in steps[0] else None
    rate = drive.measure(work, case.ranks, options.directory) if work and fio.is_installed() else 0.0
    steps = steps[1:]  # the first one prepares
    return Run(
        *(statistics.median(step[name] for step in steps) for name in ("seconds", "tokens_per_second")),
        **{name: steps[-1][name] for name in ("forecast_seconds", "forward_share", "bytes")},
        exposed_seconds={
            phase: statistics.median(step["exposed_seconds"][phase] for step in steps) for phase in steps[0]["exposed_seconds"]
        },
        resident_bytes=resident,
        work=work,
        drive_rate=rate,
    )


def records(case: Case, runs: Runs) -> list[dict]:
    """Return the lines of a case: its speed, its forecast and the floor vs. its step, the exposed time, and the memory."""
    ours = runs[case.name]
    median = lambda of: statistics.median(map(of, ours))
    mebibytes = {tier: count / 2**20 for tier, count in ours[0].bytes.items() if count}
    forecast = suite.line(f"{case.name}, forecast/step", median(lambda run: run.forecast_seconds / run.seconds), "x")
    lines = [speed(case, runs), forecast]
    if ours[0].drive_rate:
        lines.append(suite.versus(f"{case.name}, step", "floor", "s", [run.seconds for run in ours], floors(case, runs)))
    for phase in ours[0].exposed_seconds:
        exposed = median(lambda run, phase=phase: 1e3 * run.exposed_seconds[phase])
        lines.append(suite.line(f"{case.name}, exposed in {phase}", exposed, "ms"))
    lines += [suite.line(f"{case.name}, {tier}", count, "MiB") for tier, count in mebibytes.items()]
    return [*lines, suite.line(f"{case.name}, process", median(lambda run: run.resident_bytes / 2**20), "MiB")]


def speed(case: Case, runs: Runs) -> dict:
    ours, theirs = runs[case.name], runs[case.against]
    tokens = ours[0].tokens_per_second * ours[0].seconds
    seconds = lambda side: [run.seconds for run in side]
    rate = lambda step_seconds: tokens / step_seconds
    if case.against == case.name:
        return suite.line(case.name, rate(statistics.median(seconds(ours))), "tok/s")
    return suite.versus(case.name, case.against, "tok/s", seconds(ours), seconds(theirs), value_of=rate)


def without_drive(case: Case) -> Case:
    """Return the nearest configuration without a drive."""
    by_name = {each.name: each for each in CASES}
    while case.on_drive:
        case = by_name[case.against]
    return case


def share_of(part: str, run: Run) -> float:
    """Return the share of a step's seconds that this part of it takes."""
    return {"nothing": 0.0, "forward": run.forward_share, "backward": 1 - run.forward_share, "all": 1.0}[part]


def floors(case: Case, runs: Runs) -> list[float]:
    """Return the shortest step of each round, from fio and from the same round of the case without a drive."""
    return [
        drive.floor(run.work, case.ranks, run.drive_rate, other.seconds, share_of(case.overlaps_with, other))
        for run, other in zip(runs[case.name], runs[without_drive(case).name], strict=True)
    ]


def with_their_opponents(chosen: list[Case]) -> list[Case]:
    names = {case.name for case in chosen}
    for case in reversed(CASES):  # an opponent comes earlier in the list
        if case.name in names:
            names.add(case.against)
    return [case for case in CASES if case.name in names]


def arguments() -> argparse.Namespace:
    parser = suite.parser_of("training", __doc__, directory="a directory on the drive that keeps state", rounds=5)
    parser.add_argument("--program", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank in a step")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run; the first one is not counted")
    return suite.choose(parser, CASES, lambda case: case.name)


def main() -> None:
    options = arguments()
    if not fio.is_installed():
        print("training: fio is not installed, so there are no floors of rows with a drive", file=sys.stderr)
    cases = with_their_opponents(options.cases)
    by_case = suite.in_turn(cases, lambda case: run_once(case, options), options.rounds)
    runs = {case.name: of_case for case, of_case in by_case.items()}
    for case in cases:
        suite.emit("training", records(case, runs))


if __name__ == "__main__":
    main()
