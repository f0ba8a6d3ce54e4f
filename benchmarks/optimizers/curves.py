"""Compare the curves of losses of torch's Muon and of Ballast's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from contenders import BALLAST_MUON, CONTEST, TORCH_MUON
from contest import Case, Finished
from variants import SEEDS


class Gap(NamedTuple):
    """The largest difference between two curves, and where it is."""

    size: float
    seed: int
    step: int


def largest_gap(finished: Finished) -> Gap | None:
    """Return the largest difference between the curves of both with the same seed, if there are some."""
    gaps = []
    for seed in SEEDS:
        both = [finished.get(Case(optimizer, seed)) for optimizer in (TORCH_MUON, BALLAST_MUON)]
        if all(both):
            theirs, ours = (row["curve"] for row in both if row)
            gaps += [Gap(abs(our - their), seed, step) for (step, their), (_, our) in zip(theirs, ours, strict=True)]
    return max(gaps, key=lambda gap: (not math.isfinite(gap.size), gap.size), default=None)


def sentence(finished: Finished) -> str:
    gap = largest_gap(finished)
    if gap is None:
        return ""
    where = f"seed {gap.seed}, step {gap.step}"
    return f"The largest difference between the curves of {TORCH_MUON} and of {BALLAST_MUON} is {gap.size:.2g} ({where}).\n"


def records(finished: Finished) -> list[dict[str, Any]]:
    """Return a line when both have all seeds."""
    gap = largest_gap(finished)
    all_there = all(Case(each, seed) in finished for each in (TORCH_MUON, BALLAST_MUON) for seed in SEEDS)
    return [CONTEST.record("Muon, difference of curves", gap.size)] if gap is not None and all_there else []
