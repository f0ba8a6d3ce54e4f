"""Shared code of the suites in Python: their options, and the line of JSON of a case."""

import argparse
import json
import os
import socket
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def add_choice(parser: argparse.ArgumentParser) -> None:
    of_text = "only the cases whose line in --list contains this text; if given several times, any of them"
    parser.add_argument("--only", action="append", metavar="TEXT", help=of_text)
    parser.add_argument("--list", action="store_true", help="name the cases and stop")


def choose(parser: argparse.ArgumentParser, cases: Sequence, line: Callable[..., str]) -> argparse.Namespace:
    """Return the options with the chosen cases; with --list, name them and end the program."""
    options = parser.parse_args()
    options.cases = [case for case in cases if any(text in line(case) for text in options.only or [""])]
    if not options.cases:
        parser.error(f'no case has "{" or ".join(options.only)}" in its line; --list names them')
    if options.list:
        print("\n".join(line(case) for case in options.cases))
        parser.exit()
    return options


def comparison(ours: list[float], theirs: list[float], value_of: Callable[[float], float]) -> dict:
    """Return the seconds of rounds that ran in turn as fields of a line; `value_of` turns seconds into the case's unit."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratio] * 3
    return {
        "value": value_of(statistics.median(ours)),
        "against_value": value_of(statistics.median(theirs)),
        "ratio": ratio,
        "spread": (quartiles[2] - quartiles[0]) / (2 * ratio),
    }


def lines(rows: Sequence[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def machine_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine as the report has it: "AMD EPYC 9554, 2 cores"."""
    fields = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    cpu = next((value.strip() for name, _, value in fields if name.strip() == "model name"), "unknown processor")
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} {'core' if cores == 1 else 'cores'}"


def free_port() -> int:
    """Return a port of this machine that no process uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commit() -> str:
    """Return the commit of this tree, and whether files have changed since."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"
