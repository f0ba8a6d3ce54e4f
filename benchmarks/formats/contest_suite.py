"""The command of a suite that compares contenders: it makes the runs that its file lacks, and shows all of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import runs
import suite
from contest import Case, Contest, Finished
from variants import POINTS


class Losses(Protocol):
    curve: list[tuple[int, float]]
    last: float


class Training(NamedTuple):
    """What a suite trains. It imports torch when it is called: `--help` and `--table` need none."""

    setting: Callable[
        [int], str
    ]  # in words, of a run of so many steps: all that decides the losses, besides contender and seed
    run: Callable[[Case, int, Path], Losses]  # the folder is for what a stopped run has trained


def arguments(contest: Contest, description: str | None, steps: int) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=contest.suite, description=description, formatter_class=formatter)
    suite.add_choice(parser)
    of_runs = f"the file of the finished runs ({contest.suite}.jsonl in the build)"
    parser.add_argument("--runs", type=Path, required=True, help=of_runs)
    parser.add_argument("--steps", type=int, default=steps, help=f"of a run, a multiple of {POINTS}")
    parser.add_argument("--table", action="store_true", help="show the runs in the file, and train nothing")
    options = suite.choose(parser, contest.cases, lambda case: case.name)
    if options.steps < POINTS or options.steps % POINTS:
        parser.error(f"--steps must be a multiple of {POINTS}, not {options.steps}")
    return options


def make_runs(contest: Contest, options: argparse.Namespace, training: Training) -> None:
    """Make the runs that the file lacks."""
    setting = training.setting(options.steps)
    finished = contest.read(options.runs)
    refuse_other_settings(contest, finished, setting)
    of_run = {"setting": setting, "machine": suite.machine_name(), "commit": suite.commit()}
    for case in options.cases:
        if case in finished:
            continue
        print(f"{contest.suite}: {case.name}", file=sys.stderr, flush=True)
        losses = training.run(case, options.steps, options.runs.with_suffix("") / folder_of(case, options.steps))
        trained = {"curve": losses.curve, "loss": losses.last, **of_run}
        runs.append(options.runs, {**contest.row_of(case), **trained, "command": command_of(contest, case, options.steps)})
        print(f"{contest.suite}: loss {losses.last:.4f}", file=sys.stderr, flush=True)


def refuse_other_settings(contest: Contest, finished: Finished, setting: str) -> None:
    """End the program if the losses of a recorded run cannot be compared with those of the runs to make."""
    for case, row in finished.items():
        if row["setting"] != setting:
            reason = f"{case.name} has '{row['setting']}', not '{setting}'"
            sys.exit(f"{contest.suite}: cannot add to the recorded runs: {reason}; use another file")


def folder_of(case: Case, steps: int) -> str:
    """Return the name of the folder with what a stopped run has trained."""
    return f"{case.contender.replace(',', '').replace(' ', '-')}-seed-{case.seed}-{steps}-steps"


def command_of(contest: Contest, case: Case, steps: int) -> str:
    """Return the command that repeats one run."""
    return shlex.join(["./run-benchmarks", contest.suite, "--", "--only", case.name, "--steps", str(steps)])
