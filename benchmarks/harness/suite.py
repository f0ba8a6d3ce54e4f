"""Shared code of the suites in Python: their options, their ranks, and the line of JSON of a case."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]


def parser_of(suite: str, about: str | None, *, directory: str = "", rounds: int = 0) -> argparse.ArgumentParser:
    """Return a parser with the options that suites share: `directory` says what is kept there, and `rounds` is the default."""
    description = (about or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog=suite, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if directory:
        parser.add_argument("--directory", type=Path, default=Path.cwd(), help=f"{directory} (here)")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds of each case (%(default)s)")
    return parser


def choose(parser: argparse.ArgumentParser, cases: Sequence, line: Callable[..., str]) -> argparse.Namespace:
    """Return the options with the chosen cases; with --list, name them and end the program."""
    meaning = "only the cases whose line in --list contains this text; if given several times, any of them"
    parser.add_argument("--only", action="append", metavar="TEXT", help=meaning)
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args()
    options.cases = [case for case in cases if any(text in line(case) for text in options.only or [""])]
    if not options.cases:
        parser.error(f'no case has "{" or ".join(options.only)}" in its line; --list names them')
    if options.list:
        print("\n".join(line(case) for case in options.cases))
        parser.exit()
    return options


def start_ranks(
    ranks: int, command: Callable[[int], Sequence], options: Callable[[int], Mapping[str, Any]]
) -> list[subprocess.Popen]:
    """Start a job on this machine as `ballast bench` does; `command` and `options`, of Popen, are those of a rank."""
    from ballast.tools.bench.cases import free_port, start_rank  # --list and --table need no package

    port = free_port()
    return [start_rank(command(rank), rank, ranks, port, **options(rank)) for rank in range(ranks)]


def run_ranks(what: str, ranks: int, command: Callable[[int], Sequence], folder: Path) -> list[Any]:
    """Return what ranks with one thread each print as JSON; some may print nothing. If one fails, end the program with the end
    of its log."""
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    own = {"env": {"OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE, "text": True}
    running = start_ranks(ranks, command, lambda rank: {**own, "stderr": logs[rank].open("w")})
    said = [rank.communicate()[0] for rank in running]
    for number, rank in enumerate(running):
        if rank.returncode != 0:
            raise SystemExit(f"{what}: rank {number} failed:\n{logs[number].read_text()[-4000:]}")
    return [json.loads(text) for text in said if text]


def end_of(process: subprocess.Popen) -> int:
    """Wait for a process, whose exit code is then known. Return its resident peak in bytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss << 10


def in_turn(subjects: Iterable[Any], run: Callable[[Any], Any], rounds: int, warm_up: int = 0) -> dict[Any, list[Any]]:
    """Run the subjects in turn, round after round. Return what each run has returned, without the rounds that warm up."""
    samples: dict[Any, list[Any]] = {subject: [] for subject in subjects}
    for number in range(-warm_up, rounds):
        for subject, own in samples.items():
            sample = run(subject)
            if number >= 0:
                own.append(sample)
    return samples


def line(case: str, value: float, unit: str) -> dict:
    """Return the line of a case that is compared with nothing."""
    return {"case": case, "value": value, "unit": unit, "against": "", "ratio": None}


def versus(case: str, against: str, unit: str, *sides: Sequence[float], value_of: Callable[[float], float] = float) -> dict:
    """Return the line of a case whose rounds ran in turn with those of another subject."""
    return {"case": case, "unit": unit, "against": against, **comparison(*sides, value_of)}


def comparison(ours: Sequence[float], theirs: Sequence[float], value_of: Callable[[float], float]) -> dict:
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


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return a line of a suite in C++, which has the rates of all rounds, with their statistics in place of the rates."""
    ours, theirs = record.pop("rates"), record.pop("against_rates")
    if not theirs:
        return record | {"value": statistics.median(ours), "ratio": None}
    return record | comparison([1 / rate for rate in ours], [1 / rate for rate in theirs], lambda seconds: 1 / seconds)


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[Any]:
    """Return the lines of a file, which has none before it exists."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def emit(suite: str, rows: Iterable[Mapping[str, Any]], output: TextIO | None = None) -> None:
    """Print the lines of a suite for the report, at once."""
    print(lines({"suite": suite, **row} for row in rows), end="", file=output, flush=True)


def own_output() -> TextIO:
    """Return standard output. What DeepSpeed and its compilers write there goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def renew(page: Path, program: str, text: str) -> None:
    """Replace the part of a page that a program has written."""
    begin, end = f"<!-- written by {program} -->", "<!-- end -->"
    page.write_text(re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page.read_text(), flags=re.DOTALL))


def status(field: str) -> int:
    """Return the bytes in the line of this name in the kernel's status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def machine_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine: "AMD EPYC 9554, 2 cores"."""
    fields = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    cpu = next((value.strip() for name, _, value in fields if name.strip() == "model name"), "unknown processor")
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} {'core' if cores == 1 else 'cores'}"


def commit() -> str:
    """Return the commit of this tree, and whether files have changed since."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"
