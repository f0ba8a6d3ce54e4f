"""Tests of copies and pickles of a wrapped model: they are plain models, independent of the training."""

import copy
import pickle

import ballast
import pytest
import torch
from python.wrap.support import copies
from python.wrap.support.keywords import keywords
from python.wrap.support.ranks import run_ranks

BELOW_STAGE_3 = [{"stage": 0}, {"stage": 2}, {"stage": 2, "overlap_gathers": True}]
everywhere = pytest.mark.parametrize("options", [*BELOW_STAGE_3, {"stage": 3}], ids=str)


@everywhere
def test_a_copy_is_used_and_changed_and_the_training_does_not_notice(options):
    """One rank alone evaluates an average of the weights, without waiting for other ranks."""
    disturbed, undisturbed = (run_ranks(2, copies.average_of_weights, options, used) for used in (True, False))
    assert disturbed == undisturbed


@everywhere
def test_a_copy_is_trained_by_an_optimizer_of_its_own(options):
    model, optimizer = copies.begun(**options)
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
    model, optimizer = copies.begun(**options)
    read = pickle.loads(pickle.dumps(model))
    assert torch.equal(read(torch.ones(20)), model(torch.ones(20)))
    optimizer.close()
    assert torch.equal(read(torch.ones(20)), model(torch.ones(20)))


def test_a_model_in_stage_3_is_not_pickled():
    model, _ = copies.begun(stage=3)
    with pytest.raises(ballast.UsageError, match="pickle(.|\n)*state_dict"), ballast.gather(model):
        pickle.dumps(model)
