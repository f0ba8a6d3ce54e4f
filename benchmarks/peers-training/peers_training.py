"""Train one GPT of plain torch on CPU ranks with Ballast and with its peers, and compare their speed and memory."""

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import suite
from systems import ADAMW, ALONE, CASES, DDP, MUON, Case, with_their_opponents

OURS = "Ballast"
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
    resident_bytes: float = 0.0  # the peak of the largest rank
    net_bytes: float = 0.0  # the same, without the memory that is resident after torch is imported
    sent_bytes: float = 0.0  # of a step on the busiest link, where hosts are imitated


def run_once(case: Case, directory: Path, text: Path) -> Run:
    with tempfile.TemporaryDirectory(prefix="ballast-peers-", dir=directory) as folder:
        command = [sys.executable, RANK, case.system.name, case.workload.name, folder, text]
        return summary(suite.run_ranks(f"peers-training: {case.name}", case.workload.ranks, lambda rank: command, Path(folder)))


def summary(ranks: list[dict]) -> Run:
    return Run(
        seconds=max(statistics.fmean(rank["seconds"]) for rank in ranks),
        losses=[statistics.fmean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        resident_bytes=max(rank["peak_bytes"] for rank in ranks),
        net_bytes=max(rank["peak_bytes"] - rank["imported_bytes"] for rank in ranks),
        sent_bytes=max(rank.get("sent_bytes", 0) for rank in ranks) / len(ranks[0]["seconds"]),
    )


Runs = dict[Case, list[Run]]


def records(case: Case, runs: Runs) -> list[dict]:
    """Return a line of speed for each opponent, and a line of memory for each opponent that trains."""
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
    return lines


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest difference, or infinity where a loss is not finite."""
    differences = [abs(loss - other) for loss, other in zip(losses, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def times_faster(ours: list[Run], theirs: list[Run]) -> float:
    return statistics.median(them.seconds / us.seconds for us, them in zip(ours, theirs, strict=True))


def details(case: Case, runs: Runs) -> dict:
    """Return a row of the table and the plot."""
    ours, reference, limit = runs[case], runs[case.reference], runs[case.limit]
    median = lambda side, field: statistics.median(getattr(run, field) for run in side)
    return {
        "case": case.system.name,
        "model": case.workload.title,
        "group": OURS if case.system.is_ballast else "peers",
        "trains": case.system.trains,
        "machine": suite.machine_name(),
        "tokens_per_second": case.workload.tokens / median(ours, "seconds"),
        "speed_ratio": times_faster(ours, reference),
        "limit_ratio": times_faster(ours, limit),
        "resident_bytes": median(ours, "resident_bytes"),
        "plotted": "resident at the peak, without the memory of importing torch",
        "plotted_bytes": median(ours, "net_bytes"),
        "memory_ratio": median(ours, "net_bytes") / median(reference, "net_bytes"),
        "losses": ours[0].losses,
        "losses_apart": max(largest_difference(run.losses, other.losses) for run, other in zip(ours, reference, strict=True)),
        "tolerance": TOLERANCES[case.workload.rule, case.workload.dtype],
    }


def table(rows: list[dict]) -> str:
    text = "\nMiB: resident at the peak, of the largest rank; net: without the memory of importing torch\n"
    text += f"vs. limit: relative to {ALONE}; vs. DDP: relative to DDP\n"
    text += f"loss: of the last step; diff: the largest difference of a step's loss from {DDP}'s\n"
    for model in dict.fromkeys(row["model"] for row in rows):
        text += f"\n{model}\n{'':<40}{'tok/s':>8}{'vs. limit':>10}{'vs. DDP':>8}{'resident':>10}{'net':>8}{'vs. DDP':>8}"
        text += f"{'loss':>9}{'diff':>8}\n"
        for row in (row for row in rows if row["model"] == model):
            text += f"{row['case']:<40}{row['tokens_per_second']:>8.0f}{row['limit_ratio']:>10.2f}{row['speed_ratio']:>8.2f}"
            if not row["trains"]:
                text += "\n"
                continue
            text += f"{row['resident_bytes'] / MEBIBYTE:>10.0f}{row['plotted_bytes'] / MEBIBYTE:>8.0f}"
            text += f"{row['memory_ratio']:>8.2f}{row['losses'][-1]:>9.4f}{row['losses_apart']:>8.4f}\n"
    return text


def with_other_losses(rows: list[dict]) -> list[dict]:
    """Return the rows of systems whose losses differ from DDP's by more than the tolerance."""
    return [row for row in rows if row["losses_apart"] > row["tolerance"]]


def main() -> None:
    parser = suite.parser_of("peers-training", __doc__, directory="a directory on the drive that keeps state", rounds=3)
    suite.add_details(parser)
    options = suite.choose(parser, CASES, lambda case: case.name)
    cases = with_their_opponents(options.cases)
    with tempfile.TemporaryDirectory(prefix="ballast-peers-") as folder:
        text = Path(folder) / "text"
        runs = suite.in_turn(cases, lambda case: run_once(case, options.directory, text), options.rounds)
    for case in cases:
        suite.emit("peers-training", records(case, runs))
    rows = [details(case, runs) for case in cases]
    print(table(rows), file=sys.stderr)
    rows = [row for row in rows if row["trains"]]
    suite.keep(rows, options)
    others = with_other_losses(rows)
    for row in others:
        difference = f"its losses differ by {row['losses_apart']:.3f} from {DDP}'s; {row['tolerance']} is allowed"
        print(f"{row['case']}, {row['model']}: {difference}", file=sys.stderr)
    if any(row["group"] == OURS for row in others):
        sys.exit("peers-training: Ballast's losses differ from DDP's")


if __name__ == "__main__":
    main()
