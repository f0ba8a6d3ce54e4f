"""Tests of losses that cause gradients of another optimizer, after its step and before they are cleared."""

import ballast
import pytest
import torch
from python.wrap.support.adversarial import Adversaries, trains_adversaries
from python.wrap.support.ranks import run_ranks

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
