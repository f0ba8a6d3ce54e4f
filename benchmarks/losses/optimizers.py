"""Compare the losses of a GPT of 30 million parameters that Muon trains in plain torch, Muon in Ballast, and AdamW in Ballast.

A run of 1,000 steps with Muon takes hours of one core.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import contest
import suite
from contest import SEEDS, TRAINING, Case, Contest, Finished

# Muon updates the matrices of blocks, with AdamW for all others.
TORCH_MUON = "Muon in torch"
BALLAST_MUON = "Muon in Ballast"
BALLAST_ADAMW = "AdamW in Ballast"
WEIGHT_DECAY = 0.01  # the decay of all optimizers; AdamW's default, where Muon's would be 0.1
UPDATE = f"fp32 parameters, weight decay {WEIGHT_DECAY:g}, Muon's rate adjusted to AdamW's"
CONTEST = Contest("optimizers", "optimizer", (TORCH_MUON, BALLAST_MUON, BALLAST_ADAMW), (UPDATE,))


def largest_gap(finished: Finished) -> float | None:
    """Return the largest difference between the curves of both Muons with the same seed, if there are some."""
    gaps = []
    for seed in SEEDS:
        both = [finished.get(Case(optimizer, seed)) for optimizer in (TORCH_MUON, BALLAST_MUON)]
        if all(both):
            theirs, ours = (row["curve"] for row in both if row)
            gaps += [abs(our - their) for (_, their), (_, our) in zip(theirs, ours, strict=True)]
    return max(gaps, key=lambda gap: (not math.isfinite(gap), gap), default=None)


def records_of_curves(finished: Finished) -> list[dict[str, Any]]:
    """Return a line when both have all seeds."""
    gap = largest_gap(finished)
    all_there = all(Case(each, seed) in finished for each in (TORCH_MUON, BALLAST_MUON) for seed in SEEDS)
    return [suite.line("Muon, difference of curves", gap, "loss")] if gap is not None and all_there else []


def train(case: Case, steps: int, _: Path) -> contest.Losses:
    return training_of(case, steps).to_the_end()


def training_of(case: Case, steps: int) -> Any:
    import torch
    from loss_training import Plan, Training

    plan = Plan(TRAINING, case.seed, steps)
    model = plan.model(torch.float32)
    plain = plain_optimizers(case, model)
    if case.contender == TORCH_MUON:
        return Training(plan, model, plain)
    return Training.with_ballast(plan, model, plain)


def plain_optimizers(case: Case, model: Any) -> list[Any]:
    import torch
    from trainers import for_muon

    options = {"lr": TRAINING.learning_rate, "weight_decay": WEIGHT_DECAY}
    if case.contender == BALLAST_ADAMW:
        return [torch.optim.AdamW(model.parameters(), **options)]
    matrices, others = for_muon(model)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    return [muon, torch.optim.AdamW(others, **options)]


def main() -> None:
    contest.Suite([CONTEST], __doc__, steps=1000, train=train, more=records_of_curves).main()


if __name__ == "__main__":
    main()
