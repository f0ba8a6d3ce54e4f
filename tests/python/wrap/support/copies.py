"""Trainings that copy a wrapped model."""

import copy
from typing import Any

import ballast
import torch
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import mlp


def begun(**options):
    """Return the model and optimizer of a training after its first step."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model, **keywords(**options))
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def average_of_weights(rank: int, options: dict[str, Any], used: bool) -> list[float]:
    """Return the losses of a training. If `used` is set, rank 0 evaluates an average of the weights after each step."""
    model, optimizer = begun(**options)
    with ballast.gather(model):
        average = copy.deepcopy(model)
    losses = []
    for step in range(3):
        batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with ballast.gather(model), torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.lerp_(new, 0.1)
        if used and rank == 0:
            assert torch.isfinite(average(batch)).all()
            average(batch).sum().backward()
    return losses
