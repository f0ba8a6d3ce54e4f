"""Tests of deferred models: their initial values have the same bits as those of models made at once."""

import gc

import ballast
import pytest
import torch
from ballast.wrapper.deferred_init import history_of
from python.wrap.support import constructing
from python.wrap.support.constructed import Tall, Zoo
from python.wrap.support.loops import Loop, Tower, check_equal
from python.wrap.support.ranks import run_ranks


def at_once_and_deferred(make, seed=1):
    """Make a model at once and deferred. Return both, each with the next random number."""
    torch.manual_seed(seed)
    plain, after_plain = make(), torch.rand(1)
    torch.manual_seed(seed)
    with ballast.deferred():
        ours = make()
    return plain, after_plain, ours, torch.rand(1)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_initialization_gives_the_same_bits(stage):
    plain, after_plain, ours, after_ours = at_once_and_deferred(Zoo)
    assert torch.equal(after_plain, after_ours)
    large = [name for name, parameter in ours.named_parameters() if parameter.is_meta]
    assert len(large) > 15 and "own" in large and "orthogonal.weight" in large
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=stage)
    with ballast.gather(ours):
        names = {name: tensor for name, tensor in (*plain.named_parameters(), *plain.named_buffers())}
        for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
            assert tensor.dtype == names[name].dtype
            assert torch.equal(tensor, names[name]), name
    assert ours.tied.weight is ours.orthogonal.weight
    assert optimizer.memory()


def deferred_tower():
    with ballast.deferred():
        return Tower(width=48)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deferred_model_trains_as_a_plain_one(stage):
    """A deferred model with frozen, tied and unused parameters trains to the bits of a plain one."""
    plain = Loop(make_model=lambda: Tower(width=48), micro_steps=2).run(stage=stage)
    ours = Loop(make_model=deferred_tower, micro_steps=2).run(stage=stage)
    with ballast.gather(plain.model), ballast.gather(ours.model):
        check_equal(plain, ours)


def test_all_ranks_make_the_values_of_rank_0():
    plain, _, _, _ = at_once_and_deferred(Tall, seed=0)
    for stages in run_ranks(2, constructing.constructs_with_its_own_seed):
        for made in stages:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain.parameters(), made))


def test_ranks_that_construct_different_models_are_refused():
    for said in run_ranks(2, constructing.constructs_differently):
        assert "different ways" in said


def test_using_a_parameter_before_training_is_refused_with_a_remedy():
    _, _, ours, _ = at_once_and_deferred(Tall)
    weight = ours.blocks[0].weight
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    assert weight is ours.blocks[0].weight
    assert weight.shape == (48, 48)
    with pytest.raises(ballast.UsageError, match=r"B1007(.|\n)*blocks.0.weight(.|\n)*ballast.gather"):
        weight.sum()
    del optimizer
    with pytest.raises(ballast.UsageError, match="optimizer is gone"), ballast.gather(weight):
        pass


@pytest.mark.parametrize("close", [True, False])
def test_the_next_optimizer_takes_over_a_model_that_was_never_trained(close):
    plain, _, ours, _ = at_once_and_deferred(Tall)
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    if close:
        optimizer.close()
    del optimizer
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    with pytest.raises(ballast.UsageError, match=r"blocks.0.weight(.|\n)*ballast.gather"):
        ours.blocks[0].weight.sum()
    with ballast.gather(ours):
        assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    optimizer.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_without_values_are_named(stage):
    with torch.device("meta"):
        model = Tall()
    with pytest.raises(ballast.UsageError, match="without a model"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), stage=2)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    with pytest.raises(ballast.UsageError, match=r"norm.running_mean(.|\n)*ballast.load"):
        model(torch.ones(8, 20))
    model.norm = torch.nn.Identity()
    with pytest.raises(ballast.UsageError, match=r"first.weight(.|\n)*ballast.load"):
        optimizer.memory()


def test_a_run_resumes_without_initial_values(tmp_path):
    options = {"offload": f"nvme:{tmp_path}", "run": "mine"}

    def train(model, steps):
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, **options)
        run = Loop(steps=steps).train(model, optimizer, optimizer.steps)
        optimizer.close()
        return run

    def without_norm(model):
        model.norm = torch.nn.Identity()
        return model

    torch.manual_seed(0)
    uninterrupted = Loop(make_model=lambda: without_norm(Tall())).run(stage=3)
    torch.manual_seed(0)
    train(without_norm(Tall()), 3)
    with torch.device("meta"):
        model = without_norm(Tall())
    resumed = train(model, 6)
    assert resumed.losses == uninterrupted.losses[3:]


def test_histories_outlive_a_garbage_collection():
    """The history of a tensor survives, also if its values are computed from its earlier values."""
    with torch.no_grad(), ballast.deferred():
        weight = torch.empty(60, 60).uniform_()
        weight.copy_(weight.new_empty((60, 60)).normal_() + weight)
    gc.collect()
    assert history_of(weight) is not None
