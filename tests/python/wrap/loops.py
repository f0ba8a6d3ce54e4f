"""Plain torch training loops, with and without the one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import ballast

torch.set_num_threads(1)

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def mlp(width: int = 24) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.Tanh(), torch.nn.Linear(width, 5))


def mean_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@dataclass
class Loop:
    """A training, the same in everything but the optimizer."""

    make_model: Callable[[], torch.nn.Module] = mlp
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    loss: Loss = mean_square
    steps: int = 6
    micro_steps: int = 1
    clip: float | None = None
    rank: int = 0
    ranks: int = 1

    def batch(self, number: int) -> torch.Tensor:
        """This rank's part of one that all ranks share."""
        everything = torch.randn(8 * self.ranks, 20, generator=torch.Generator().manual_seed(number))
        return everything[self.rank * 8 : (self.rank + 1) * 8]

    def run(self, **options: Any) -> Run:
        """With options: wrapped."""
        model = self.make_model()
        optimizer = self.make_optimizer(model.parameters(), **self.optimizer_options)
        if options:
            optimizer = ballast.wrap(optimizer, model, **options)
        return self.train(model, optimizer)

    def train(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> Run:
        losses = []
        for step in range(first, self.steps):
            for micro in range(self.micro_steps):
                loss = self.loss(model, self.batch(step * self.micro_steps + micro))
                (loss / self.micro_steps).backward()
                losses.append(loss.item())
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
        return Run(model, optimizer, losses)


@dataclass
class Run:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def check_close(one: Run, other: Run, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses), atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(one.parameters, other.parameters):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def check_equal(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    for mine, theirs in zip(one.parameters, other.parameters):
        assert torch.equal(mine, theirs)
