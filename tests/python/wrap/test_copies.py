"""Tests of copies and pickles of a wrapped model: they are plain models, independent of the training."""

import copy
import pickle

import ballast
import pytest
import torch
from python.wrap.support import copies
from python.wrap.support.ranks import run_ranks

every_stage = pytest.mark.parametrize("stage", [0, 2, 3])


@every_stage
def test_a_copy_is_used_and_changed_and_the_training_does_not_notice(stage):
    """One rank alone evaluates an average of the weights, without waiting for other ranks."""
    disturbed, undisturbed = (run_ranks(2, copies.average_of_weights, stage, used) for used in (True, False))
    assert disturbed == undisturbed


@every_stage
def test_a_copy_is_trained_by_an_optimizer_of_its_own(stage):
    model, optimizer = copies.begun(stage)
    with ballast.gather(model):
        copied = copy.deepcopy(model)
    other = ballast.wrap(torch.optim.AdamW(copied.parameters(), lr=0.1), copied, stage=stage)
    for each, step in ((copied, other.step), (model, optimizer.step)):
        each(torch.ones(20)).sum().backward()
        step()
    with ballast.gather(model), ballast.gather(copied):
        assert all(torch.isfinite(parameter).all() for parameter in [*model.parameters(), *copied.parameters()])
        assert not torch.equal(model[0].weight, copied[0].weight)  # the learning rates differ
    assert (optimizer.steps, other.steps) == (2, 1)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_below_stage_3_is_pickled_with_its_values(stage):
    model, optimizer = copies.begun(stage)
    read = pickle.loads(pickle.dumps(model))
    assert torch.equal(read(torch.ones(20)), model(torch.ones(20)))
    optimizer.close()
    assert torch.equal(read(torch.ones(20)), model(torch.ones(20)))


def test_a_model_in_stage_3_is_not_pickled():
    model, _ = copies.begun(3)
    with pytest.raises(ballast.UsageError, match="pickle(.|\n)*state_dict"), ballast.gather(model):
        pickle.dumps(model)
