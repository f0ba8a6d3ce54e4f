"""Tests of losses that cause gradients of another optimizer, after its step and before they are cleared."""

from __future__ import annotations

from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks
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


stages = pytest.mark.parametrize("stage", [0, 2, 3])


@stages
@pytest.mark.parametrize("clears_models", [False, True])
def test_gradients_of_another_loss_are_cleared_before_the_next_step(clears_models, stage):
    expected = pytest.approx(trains_adversaries(0, None, clears_models), rel=1e-5)
    assert trains_adversaries(0, stage, clears_models) == expected
    assert run_ranks(2, trains_adversaries, stage, clears_models) == [expected] * 2


USES = {
    "step": lambda pair: pair.judges.step(),
    "norm": lambda pair: pair.judges.clip_grad_norm_(1.0),
    "norm of torch": lambda pair: torch.nn.utils.clip_grad_norm_(pair.discriminator.parameters(), 1.0),
}


@stages
@pytest.mark.parametrize("use", USES)
def test_sums_with_gradients_of_the_last_step_are_not_used(use, stage):
    """Torch would use the sum. The values that the last step has used are gone."""
    pair = Adversaries(stage)
    pair.judge(0), pair.deceive(0)
    added = "gradients were added to those of the last step, which have not been cleared"
    with pytest.raises(ballast.UsageError, match=rf"B1007 cannot (.|\n)*: {added}(.|\n)*parameter \d.(.|\n)*zero_grad"):
        USES[use](pair)
    assert pair.judges.steps == 1
    pair.judges.zero_grad()
    pair.judge(1)
    assert pair.judges.steps == 2


def test_updates_in_the_backward_pass_need_gradients_that_were_cleared():
    pair = Adversaries(3, update_in_backward=True)
    pair.judges.zero_grad()
    pair.discriminator(torch.ones(3, 8)).sum().backward()
    pair.judges.step()
    with pytest.raises(ballast.UsageError, match="B1007 cannot update parameters in the backward pass: gradients were added"):
        pair.deceive(0)


@stages
def test_an_optimizer_closes_between_the_pass_of_another_loss_and_its_step(stage):
    pair = Adversaries(stage)
    pair.judge(0), pair.deceive(0)
    pair.judges.close()
    pair.makes.step()
    assert (pair.makes.steps, pair.discriminator(torch.ones(3, 8)).shape) == (1, (3, 1))
