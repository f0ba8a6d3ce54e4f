"""Uncommon uses of autograd: functions that other processes can find by name."""

from __future__ import annotations

from typing import Any

import ballast
import torch
from torch import nn


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Field(nn.Module):
    """A model that returns an energy and, if `in_forward` is set, the forces, as models of molecules do."""

    def __init__(self, in_forward: bool):
        super().__init__()
        torch.manual_seed(0)
        self.in_forward = in_forward
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        energy: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return energy

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        energy = self.energy(x)
        return energy, forces(energy, x) if self.in_forward else x


def forces(energy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(energy.float().sum(), x, create_graph=True)[0]


def penalized(penalty: str, **options: Any) -> torch.Tensor:
    """Return the losses of a training whose loss has gradients in it, and the parameters after it. With options, the
    optimizer is wrapped."""
    model = Field(in_forward=penalty == "in forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **options)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=penalty == "under autocast"):
            energy, found = model(batch())
        gradient = found if model.in_forward else forces(energy, found)
        loss = energy.square().mean() + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().reshape(1))
    with ballast.gather(model):
        return torch.cat([*losses, *(each.detach().flatten().clone() for each in model.parameters())])


def penalized_on_each_rank(rank: int, penalties: list[str]) -> list[torch.Tensor]:
    return [penalized(penalty, stage=3) for penalty in penalties]


def retained(*, autocast: bool = False, **options: Any) -> tuple[Field, Any, torch.Tensor]:
    """Return a model after a step, its optimizer, and a loss whose graph has not been used."""
    model = Field(in_forward=False)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    model(batch())[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        energy, _ = model(batch())
    return model, optimizer, energy.float().square().mean()
