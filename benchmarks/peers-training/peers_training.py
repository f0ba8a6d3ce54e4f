"""Train one GPT of plain torch on CPU ranks with Ballast and with its peers, and compare their speed and memory."""

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import suite
from systems import ADAMW, CASES, MUON, Case, with_their_opponents

RANK = Path(__file__).with_name("trainers.py")
MEBIBYTE = 1 << 20

# Systems round differently (gradients, parameters without a master), which moves losses apart by less than this. What torch's
# Muon adds to bf16 parameters is lost in their rounding more often than what AdamW adds.
TOLERANCES = {
    (ADAMW, "bfloat16"): 0.1,
    (ADAMW, "float32"): 0.002,
    (MUON, "bfloat16"): 0.2,
    (MUON, "float32"): 0.002,
}


class Run(NamedTuple):
    """What a system took in one run, and its losses."""

    seconds: float  # the time of a step on the slowest rank
    losses: list[float]  # the loss of each step, the mean of all ranks
    net_bytes: float = 0.0  # the peak of the largest rank, without the memory that is resident after torch is imported
    sent_bytes: float = 0.0  # of a step on the busiest link, where hosts are imitated


def run_once(case: Case, directory: Path, text: Path) -> Run:
    with tempfile.TemporaryDirectory(prefix="ballast-peers-", dir=directory) as folder:
        command = [sys.executable, RANK, case.system.name, case.workload.name, folder, text]
        return summary(suite.run_ranks(f"peers-training: {case.name}", case.workload.ranks, lambda rank: command, Path(folder)))


def summary(ranks: list[dict]) -> Run:
    return Run(
        seconds=max(statistics.fmean(rank["seconds"]) for rank in ranks),
        losses=[statistics.fmean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        net_bytes=max(rank["peak_bytes"] - rank["imported_bytes"] for rank in ranks),
        sent_bytes=max(rank.get("sent_bytes", 0) for rank in ranks) / len(ranks[0]["seconds"]),
    )


Runs = dict[Case, list[Run]]


def records(case: Case, runs: Runs) -> list[dict]:
    """Return lines of speed for each opponent, lines of memory for each that trains, and the loss of the last step."""
    speed = "", "tok/s", "seconds", lambda seconds: case.workload.tokens / seconds
    memory = ", memory", "MiB", "net_bytes", lambda count: count / MEBIBYTE
    opponents = [other for other in case.opponents if other in runs]
    rivals = [other for other in opponents if other.system.trains]
    lines = []
    for others, (suffix, unit, field, in_unit) in ((opponents, speed), (rivals, memory)):
        name, ours = case.name + suffix, [getattr(run, field) for run in runs[case]]
        for other in others:
            theirs = [getattr(run, field) for run in runs[other]]
            lines.append(suite.versus(name, other.name_beside(case), unit, ours, theirs, value_of=in_unit))
        if not others:
            lines.append(suite.line(name, in_unit(statistics.median(ours)), unit))
    return lines + ([suite.line(f"{case.name}, loss", runs[case][0].losses[-1], "loss")] if case.system.trains else [])


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest difference, or infinity where a loss is not finite."""
    differences = [abs(loss - other) for loss, other in zip(losses, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def tolerance_of(case: Case) -> float:
    """Return the largest difference from DDP's losses. Codes round as numbers of 16 bits do, or more."""
    return TOLERANCES[case.workload.rule, "bfloat16" if "wire" in case.system.options else case.workload.dtype]


def with_other_losses(cases: list[Case], runs: Runs) -> list[Case]:
    """Return the cases whose losses differ from DDP's by more than the tolerance, in any round."""
    trained = [(case, zip(runs[case], runs[case.reference], strict=True)) for case in cases if case.system.trains]
    apart = {case: max(largest_difference(our.losses, their.losses) for our, their in both) for case, both in trained}
    return [case for case, difference in apart.items() if difference > tolerance_of(case)]


def check_losses(name: str, cases: list[Case], runs: Runs) -> None:
    """Name the cases with other losses than DDP's, and end the suite of this name as failed if one is Ballast's."""
    others = with_other_losses(cases, runs)
    for case in others:
        print(f"{case.name}: its losses differ from DDP's by more than {tolerance_of(case)}", file=sys.stderr)
    if any(case.system.is_ballast for case in others):
        sys.exit(f"{name}: Ballast's losses differ from DDP's")


def main() -> None:
    parser = suite.parser_of("peers-training", __doc__, directory="a directory on the drive that keeps state", rounds=3)
    options = suite.choose(parser, CASES, lambda case: case.name)
    cases = with_their_opponents(options.cases)
    with tempfile.TemporaryDirectory(prefix="ballast-peers-") as folder:
        text = Path(folder) / "text"
        runs = suite.in_turn(cases, lambda case: run_once(case, options.directory, text), options.rounds)
    for case in cases:
        suite.emit("peers-training", records(case, runs))
    check_losses("peers-training", cases, runs)


if __name__ == "__main__":
    main()
