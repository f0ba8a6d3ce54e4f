"""Compare the losses of a GPT of 30 million parameters that Muon trains in plain torch, Muon in Ballast, and AdamW in Ballast.

Each run that ends is added to a file, and a run in the file is not repeated. The suite can be stopped at any time, and
continues the run that was stopped. A run of 1,000 steps with Muon takes hours of one core. All optimizers of a seed have the
same start, batches and learning rates. A line's value is a mean of the last losses of all seeds, their spread, or the largest
difference between curves; optimizers that lack a seed have no line.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import contest
from contest import SEEDS, TRAINING, Case, Contest, Finished

# Muon updates the matrices of blocks, with AdamW for all others.
TORCH_MUON = "Muon in torch"
BALLAST_MUON = "Muon in Ballast"
BALLAST_ADAMW = "AdamW in Ballast"
CONTEST = Contest("optimizers", "optimizer", (TORCH_MUON, BALLAST_MUON, BALLAST_ADAMW))
WEIGHT_DECAY = 0.01  # the decay of all optimizers; AdamW's default, where Muon's would be 0.1


class Gap(NamedTuple):
    """The largest difference between two curves, and where it is."""

    size: float
    seed: int
    step: int


def largest_gap(finished: Finished) -> Gap | None:
    """Return the largest difference between the curves of both Muons with the same seed, if there are some."""
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
    return f"\nThe largest difference between the curves of {TORCH_MUON} and of {BALLAST_MUON} is {gap.size:.2g} ({where}).\n"


def records_of_curves(finished: Finished) -> list[dict[str, Any]]:
    """Return a line when both have all seeds."""
    gap = largest_gap(finished)
    all_there = all(Case(each, seed) in finished for each in (TORCH_MUON, BALLAST_MUON) for seed in SEEDS)
    return [contest.record(CONTEST.suite, "Muon, difference of curves", gap.size)] if gap is not None and all_there else []


def setting(steps: int) -> str:
    import loss_training

    update = f"fp32 parameters, weight decay {WEIGHT_DECAY:g}, Muon's rate adjusted to AdamW's"
    return f"{loss_training.setting(TRAINING, steps, update)}, text {loss_training.TEXTS[TRAINING.text]().digest}"


def train(case: Case, steps: int, folder: Path) -> contest.Losses:
    import torch

    torch.set_num_threads(1)
    run = training_of(case, steps)
    losses: contest.Losses = run.train(folder)
    run.close()
    return losses


def training_of(case: Case, steps: int) -> Any:
    import ballast
    import torch
    from loss_training import TEXTS, PlainTraining, Plan, Training

    plan, text = Plan(TRAINING, case.seed, steps), TEXTS[TRAINING.text]()
    model = plan.model(torch.float32)
    plain = plain_optimizers(case, model)
    if case.contender == TORCH_MUON:
        return PlainTraining(plan, text, model, plain)
    return Training(plan, text, model, ballast.wrap(plain, model, tuning=ballast.Tuning(threads=1)))


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
    options = contest.choose(contest.parser_of("optimizers", __doc__, steps=1000), CONTEST.cases)
    if not options.table:
        CONTEST.make_runs(options, setting(options.steps), train)  # needs torch, which --help and --table do without
    finished = CONTEST.read(options.runs)
    CONTEST.show(finished, records_of_curves(finished), sentence(finished))


if __name__ == "__main__":
    main()
