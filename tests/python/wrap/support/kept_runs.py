"""Trainings of named runs, for the tests of resuming."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import ballast
import torch
from python.wrap.support.loops import keywords, mean_square


class Layers(torch.nn.Module):
    """Layers of the same shape, declared in the order of `names`, of which two are used."""

    def __init__(self, names: tuple[str, ...] = ("one", "two")):
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            setattr(self, name, torch.nn.Linear(20, 20))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(batch)))


def kept_in(folder: Path, stage: int = 3) -> dict:
    return {"stage": stage, "offload": {"state": f"nvme:{folder}"}, "run": "mine"}


def train(
    model: torch.nn.Module,
    rank: int,
    until: int,
    data: int = 0,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options,
) -> tuple[int, list[float]]:
    """Train up to step `until`. Return the step from which the run was resumed, and the losses from there on."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = ballast.wrap(kind(trained, lr=1e-2), model, **keywords(**options))
    began_at = optimizer.steps
    losses = losses_until(until, model, optimizer, rank, data)
    optimizer.close()
    return began_at, losses


def losses_until(
    until: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, data: int = 0
) -> list[float]:
    losses = []
    for step in range(optimizer.steps, until):
        seed = torch.Generator().manual_seed(1000 * data + 10 * step + rank)
        loss = mean_square(model, torch.randn(8, 20, generator=seed))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Stoppable(torch.optim.NAdam):
    """If it `stops`, ends its process while it updates the second tile of its third step."""

    stops = False

    of_step = 0  # tiles of the third step

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        steps = {int(self.state[each]["step"]) for group in self.param_groups for each in group["params"]}
        if steps == {3}:  # a tile of padding has none
            Stoppable.of_step += 1
        if self.stops and Stoppable.of_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
