"""Trains a generator and a discriminator: the loss of one causes gradients of the other, which are cleared later."""

from __future__ import annotations

from typing import Any

import ballast
import torch
from python.wrap.support.keywords import keywords
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of


class Adversaries:
    """A generator and a discriminator with their optimizers. Without a stage, torch trains alone."""

    def __init__(self, stage: int | None, **options: Any):
        torch.manual_seed(0)
        self.generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.makes, self.judges = (
            torch.optim.Adam(model.parameters(), lr=1e-2) for model in (self.generator, self.discriminator)
        )
        if stage is not None:
            self.makes = ballast.wrap(self.makes, self.generator, **keywords(stage=stage, **options))
            self.judges = ballast.wrap(self.judges, self.discriminator, **keywords(stage=stage, **options))

    def judge(self, step: int) -> list[torch.Tensor]:
        """Train the discriminator: one backward pass with real samples, and one with others."""
        real = torch.linspace(-1, 1 + step, 24).reshape(3, 8)
        losses = [self._loss(real, 1.0), self._loss(self._made(step).detach(), 0.0)]
        for loss in losses:
            loss.backward()
        self.judges.step()
        return losses

    def deceive(self, step: int) -> torch.Tensor:
        """Compute the gradients of the generator, and those of the discriminator, which nothing uses."""
        loss = self._loss(self._made(step), 1.0)
        loss.backward()
        return loss

    def _loss(self, samples: torch.Tensor, truth: float) -> torch.Tensor:
        return loss_of(self.discriminator(samples), torch.full((3, 1), truth))

    def _made(self, step: int) -> torch.Tensor:
        made: torch.Tensor = self.generator(torch.linspace(step, -1, 12).reshape(3, 4))
        return made


def trains_adversaries(rank: int, stage: int | None, clears_models: bool) -> list[float]:
    """Return the losses of some steps. Gradients are cleared before a backward pass, as in PyTorch's tutorial."""
    pair, losses = Adversaries(stage), []
    for step in range(4):
        (pair.discriminator if clears_models else pair.judges).zero_grad()
        losses += pair.judge(step)
        (pair.generator if clears_models else pair.makes).zero_grad()
        losses.append(pair.deceive(step))
        pair.makes.step()
    return [each.item() for each in losses]
