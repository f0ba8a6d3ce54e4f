"""Read the file of finished runs, compare their losses, and make the records and the table."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import runs
from contenders import BALLAST_MUON, OPTIMIZERS, TORCH_MUON, Case
from loss_table import Difference, difference_of
from variants import SEEDS

Finished = dict[Case, dict[str, Any]]

COLUMNS = (
    "optimizer",
    *(f"seed {seed}" for seed in SEEDS),
    "mean",
    "highest less lowest",
    f"difference from {TORCH_MUON}",
    "more than chance?",
)


class Gap(NamedTuple):
    """The largest difference between two curves, and where it is."""

    size: float
    seed: int
    step: int


def read(path: Path) -> Finished:
    return {Case(row["optimizer"], row["seed"]): row for row in runs.rows_of(path)}


def losses_of(optimizer: str, finished: Finished) -> dict[int, float]:
    """Return the last losses by seed, without seeds that are unfinished."""
    cases = [Case(optimizer, seed) for seed in SEEDS]
    return {case.seed: finished[case]["loss"] for case in cases if case in finished}


def spread(losses: dict[int, float]) -> float:
    return max(losses.values()) - min(losses.values())


def difference(losses: dict[int, float], reference: dict[int, float]) -> Difference | None:
    """Return nothing where a seed is missing."""
    if len(losses) < len(SEEDS) or len(reference) < len(SEEDS):
        return None
    return difference_of([losses[seed] - reference[seed] for seed in SEEDS])


def largest_gap(finished: Finished) -> Gap | None:
    """Return the largest difference between the curves of torch's Muon and Ballast's with the same seed, if both have one."""
    gaps = []
    for seed in SEEDS:
        both = [finished.get(Case(optimizer, seed)) for optimizer in (TORCH_MUON, BALLAST_MUON)]
        if all(both):
            theirs, ours = (row["curve"] for row in both if row)
            gaps += [Gap(abs(our - their), seed, step) for (step, their), (_, our) in zip(theirs, ours, strict=True)]
    return max(gaps, key=lambda gap: (not math.isfinite(gap.size), gap.size), default=None)


def markdown(finished: Finished) -> str:
    head, *lines = [f"| {' | '.join(line)} |" for line in (COLUMNS, *(cells(each, finished) for each in OPTIMIZERS))]
    table = "\n".join([head, "|---" * len(COLUMNS) + "|", *lines])
    gap = largest_gap(finished)
    if gap is None:
        return f"{table}\n"
    where = f"seed {gap.seed}, step {gap.step}"
    return f"{table}\n\nThe curves of {TORCH_MUON} and of {BALLAST_MUON} differ by at most {gap.size:.4f} ({where}).\n"


def cells(optimizer: str, finished: Finished) -> list[str]:
    losses = losses_of(optimizer, finished)
    of_seeds = [f"{losses[seed]:.4f}" if seed in losses else "unfinished" for seed in SEEDS]
    if len(losses) < len(SEEDS):
        return [optimizer, *of_seeds, "", "", "", ""]
    of_all = [f"{statistics.fmean(losses.values()):.4f}", f"{spread(losses):.4f}"]
    found = difference(losses, losses_of(TORCH_MUON, finished)) if optimizer != TORCH_MUON else None
    compared = ["", ""] if found is None else [f"{found.mean:+.4f} ± {found.within:.4f}", found.finding]
    return [optimizer, *of_seeds, *of_all, *compared]


def records(finished: Finished) -> list[dict[str, Any]]:
    """Return two lines for each finished optimizer, and one for the curves of Muon when all of them are finished."""
    lines = [line for optimizer in OPTIMIZERS for line in records_of(optimizer, finished)]
    gap = largest_gap(finished)
    if gap is not None and all(Case(each, seed) in finished for each in (TORCH_MUON, BALLAST_MUON) for seed in SEEDS):
        lines.append(record("Muon, difference of curves", gap.size))
    return lines


def records_of(optimizer: str, finished: Finished) -> list[dict[str, Any]]:
    losses, reference = losses_of(optimizer, finished), losses_of(TORCH_MUON, finished)
    if len(losses) < len(SEEDS):
        return []
    mean = record(optimizer, statistics.fmean(losses.values()))
    found = difference(losses, reference) if optimizer != TORCH_MUON else None
    if found is not None:
        theirs = statistics.fmean(reference.values())
        ratios = {"ratio": theirs / mean["value"], "spread": found.within / theirs}
        mean |= {"against": TORCH_MUON, "against_value": theirs, **ratios}
    return [mean, record(f"{optimizer}, spread of seeds", spread(losses))]


def record(case: str, value: float) -> dict[str, Any]:
    return {"suite": "optimizers", "case": case, "value": value, "unit": "loss", "against": "", "ratio": None}
