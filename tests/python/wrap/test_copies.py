"""Tests of copies and pickles of a wrapped model: they are plain models, independent of the training."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import keywords, mlp
from python.wrap.support.ranks import run_ranks


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


BELOW_STAGE_3 = [{"stage": 0}, {"stage": 2}, {"stage": 2, "overlap_gathers": True}]
everywhere = pytest.mark.parametrize("options", [*BELOW_STAGE_3, {"stage": 3}], ids=str)


@everywhere
def test_a_copy_is_used_and_changed_and_the_training_does_not_notice(options):
    """One rank alone evaluates an average of the weights, without waiting for other ranks."""
    disturbed, undisturbed = (run_ranks(2, average_of_weights, options, used) for used in (True, False))
    assert disturbed == undisturbed


@everywhere
def test_a_copy_is_trained_by_an_optimizer_of_its_own(options):
    model, optimizer = begun(**options)
    with ballast.gather(model):
        copied = copy.deepcopy(model)
    other = ballast.wrap(torch.optim.AdamW(copied.parameters(), lr=0.1), copied, **keywords(**options))
    for each, step in ((copied, other.step), (model, optimizer.step)):
        each(torch.ones(20)).sum().backward()
        step()
    with ballast.gather(model), ballast.gather(copied):
        assert all(torch.isfinite(parameter).all() for parameter in [*model.parameters(), *copied.parameters()])
        assert not torch.equal(model[0].weight, copied[0].weight)  # the learning rates differ
    assert (optimizer.steps, other.steps) == (2, 1)


@pytest.mark.parametrize("options", BELOW_STAGE_3, ids=str)
def test_a_model_below_stage_3_is_pickled_with_its_values(options):
    model, optimizer = begun(**options)
    read = pickle.loads(pickle.dumps(model))
    assert torch.equal(read(torch.ones(20)), model(torch.ones(20)))
    optimizer.close()
    assert torch.equal(read(torch.ones(20)), model(torch.ones(20)))


def test_a_model_in_stage_3_is_not_pickled():
    model, _ = begun(stage=3)
    with pytest.raises(ballast.UsageError, match="pickle(.|\n)*state_dict"), ballast.gather(model):
        pickle.dumps(model)
