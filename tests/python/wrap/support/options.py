"""Rank bodies that wrap with options of their own."""

from typing import Any

import ballast
import torch
from python.wrap.support.loops import mean_square, mlp


def schedules_its_own_lr(rank: int, stage: int) -> tuple[str, int]:
    """Train until the learning rate of rank 1 differs. Return the error and the steps."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, timeout=20)
    try:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 2e-2 if (rank, step) == (1, 2) else 1e-2 / (step + 1)
            mean_square(model, torch.ones(20)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ballast.Error as error:
        return str(error), optimizer.steps
    return "", optimizer.steps


def trains_with(rank: int, of_ranks: list[dict[str, Any]]) -> tuple[str, int]:
    """Train a step with the options of this rank. Return the error, or nothing, and the steps."""
    options = dict(of_ranks[rank])
    make, group = options.pop("make", torch.optim.AdamW), options.pop("group", {"lr": 1e-2})
    model = mlp()
    optimizer = ballast.wrap(make(model.parameters(), **group), model, timeout=20, **options)
    try:
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.Error as error:
        return str(error), optimizer.steps
    return "", optimizer.steps
