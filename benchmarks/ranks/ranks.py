"""Measures what grows with the number of ranks: start, steps, memory, descriptors, and the end after a rank has died.

Each rank is a process with a tiny model, so most of what it takes is the cost of being a rank. One machine has all ranks, and
they share its cores: seconds for each rank show what grows faster than the number of ranks.
"""

import argparse
import json

from job import Job
from suite import add_choice, choose, machine_name

RANKS = (16, 64, 128, 256)
STEPS = 10
LONG = 1000000  # steps that do not end before the rank is killed

TRANSPORTS = {"shared memory": (), "Gloo": ("--gloo",)}
MOST_GLOO = 64  # each pair of ranks has connections of its own, and one machine has the ends of all of them
CASES = [(ranks, name) for name in TRANSPORTS for ranks in RANKS if name != "Gloo" or ranks <= MOST_GLOO]


def case_of(case: tuple[int, str]) -> str:
    return f"{case[0]} ranks, {case[1]}"


def measure(program: str, ranks: int, transport: str) -> dict[str, tuple[float, str]]:
    """Return values with their units, by name."""
    options = TRANSPORTS[transport]
    with Job(program, ranks, STEPS, options) as job:
        connected = job.until("connected")
        first = job.until("first step")
        all_steps = job.end()
    with Job(program, ranks, LONG, options) as job:
        job.until("first step")
        figures = {
            "connected": (connected, "s"),
            "connected, a rank": (1e3 * connected / ranks, "ms"),
            "first step after that, a rank": (1e3 * (first - connected) / ranks, "ms"),
            "further step, a rank": (1e3 * (all_steps - first) / (STEPS - 1) / ranks, "ms"),
            "memory of rank 0": (job.proportional_bytes(0) / 2**20, "MiB"),
            "memory of the last rank": (job.proportional_bytes(ranks - 1) / 2**20, "MiB"),
            "descriptors of rank 0": (job.descriptors(0), ""),
            "descriptors of the last rank": (job.descriptors(ranks - 1), ""),
            "processor time of rank 0 vs. the last": (job.processor_seconds(0) / job.processor_seconds(ranks - 1), "x"),
        }
        seconds, named = job.kill(ranks // 2)
    if named < ranks - 1:
        raise RuntimeError(f"only {named} of {ranks - 1} ranks name the rank that died")
    return figures | {"end after a rank has died": (seconds, "s")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True, help="a rank, of rank.cpp")
    add_choice(parser)
    options = choose(parser, CASES, case_of)
    for case in options.cases:
        for name, (value, unit) in measure(options.program, *case).items():
            row = {"suite": "ranks", "case": f"{case_of(case)}: {name}", "value": value, "unit": unit, "against": ""}
            print(json.dumps(row | {"ratio": None, "machine": machine_name()}), flush=True)


if __name__ == "__main__":
    main()
