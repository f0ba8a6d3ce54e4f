"""Models and loops that write to parameters outside of ballast.gather(): functions that other processes can find by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ballast
import torch
from python.wrap.support.keywords import keywords
from torch import nn


class Writing(nn.Module):
    """A model that writes to a parameter in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.table = nn.Embedding(8, 4, max_norm=0.5)
        self.code = nn.Parameter(torch.ones(4), requires_grad=False)

    def write(self, x: torch.Tensor) -> None:
        """Do nothing: a subclass writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        with torch.no_grad():
            self.write(x)
        result: torch.Tensor = self.last(x * self.code)
        return result


class Renormalizes(Writing):
    def write(self, x: torch.Tensor) -> None:
        self.table(torch.arange(8))


class Clamps(Writing):
    def write(self, x: torch.Tensor) -> None:
        self.second.weight.clamp_(-0.2, 0.2)


class AveragesCode(Writing):
    def write(self, x: torch.Tensor) -> None:
        self.code.mul_(0.9).add_(x.mean(0), alpha=0.1)


class AssignsData(Writing):
    """Assigns the tensor of an average of two modules, as MoCo does."""

    def write(self, x: torch.Tensor) -> None:
        for parameter, other in zip(self.second.parameters(), self.first.parameters()):
            parameter.data = parameter.data * 0.5 + other.data * 0.5


class TakesFromAnotherModule(Writing):
    """Writes in a function of parameters of two modules."""

    def write(self, x: torch.Tensor) -> None:
        self.first.weight.lerp_(self.second.weight, 0.5)


KINDS: dict[type[Writing], str] = {
    Renormalizes: "table.weight",
    Clamps: "second.weight",
    AveragesCode: "code",
    AssignsData: "second.weight",
    TakesFromAnotherModule: "first.weight",
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(model: nn.Module, **options: Any) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    return ballast.wrap(torch.optim.AdamW(trained, lr=0.1), model, **keywords(stage=3, **options))


def said_of_each(rank: int, **options: Any) -> dict[str, str]:
    """Return the error of each kind of model in its first step; empty for one that trains."""
    said = {}
    for kind in KINDS:
        model = kind()
        optimizer = wrapped(model, **options)
        said[kind.__name__] = error_of(lambda model=model, optimizer=optimizer: train(model, optimizer))
        optimizer.close()
    return said


def error_of(body: Callable[[], Any]) -> str:
    try:
        body()
    except ballast.UsageError as error:
        return str(error)
    return ""
