"""Uncommon models and training loops: functions that other processes can find by name."""

from __future__ import annotations

from typing import Any

import ballast
import torch
from torch import nn


def batch(number: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(7 * number + rank))


class Attends(nn.Module):
    """A model that reads parameters of its submodules directly: torch's attention does, and so does its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(16, 2)
        self.old, self.new = nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x)[0]
        apart = (self.old.weight.square().mean() * self.new.weight[0, 0]).tanh()
        return nn.functional.linear(x, torch.cat([self.old.weight, self.new.weight])) * (1 + apart)


class Expert(nn.Module):
    """A model in which the rank selects one of two experts."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.rank = rank
        self.first = nn.Linear(16, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.experts[self.rank](self.first(x))
        return chosen


def overflows_on_one_rank(rank: int, stage: int) -> list[float]:
    """Return a GradScaler's scale after each step. Rank 0's gradients overflow in the second."""
    model = Expert(rank)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(3):
        loss = model(batch(step, rank)).square().mean() * (float("inf") if (rank, step) == (0, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def clips_without_a_batch(rank: int, stage: int) -> tuple[list[float], list[torch.Tensor]]:
    """Clip in three steps, of which rank 1 has no batch in the second. Return the norms and the parameters at the end."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, stage=stage)
    norms = []
    for step in range(3):
        if (rank, step) != (1, 1):
            (100 * model(batch(step, rank)).square().mean()).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [parameter.detach().clone() for parameter in model.parameters()]


def scales_by_its_own_factor(rank: int) -> str:
    model = Expert(rank)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    (100 * model(batch(0, rank)).square().sum()).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5 / (1 + rank))
    try:
        optimizer.step()
    except ballast.UsageError as error:
        return str(error)
    return ""


def begins_with_its_own_values(rank: int, stage: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_mean.normal_()
    model[0].requires_grad_(False)
    first = {name: values.clone() for name, values in model.state_dict().items()}
    ballast.wrap(torch.optim.SGD(model[2].parameters(), lr=0.1), model, stage=stage)
    return {"first": first, "now": {name: values.clone() for name, values in model.state_dict().items()}}


class LooksTwice(torch.nn.Module):
    """A model that uses a view of a parameter before other modules run and, if `late` is set, after them too."""

    def __init__(self, late: bool):
        super().__init__()
        self.tied = torch.nn.Linear(16, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(x) @ self.tied.weight.t()
        view = self.tied.weight.t() if self.late else None
        for block in self.blocks:
            x = block(x)
        return x if view is None else x @ view


class UsedByMethod(torch.nn.Module):
    """A model that is used through a method and never called itself, as Lightning's modules are."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
        self.head = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.blocks(batch)).square().mean()
        return loss
