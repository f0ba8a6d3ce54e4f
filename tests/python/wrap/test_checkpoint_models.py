"""Checkpoints, and the models that they are of."""

import pytest
import torch
from python.wrap import saved
from python.wrap.constructed import Tall
from python.wrap.loops import Loop, Tower
from python.wrap.saved import Training, same

import ballast


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.register_parameter("more", torch.nn.Parameter(torch.ones(3))), "lacks a parameter(.|\n)*more"),
        (lambda model: delattr(model, "unused"), "the model lacks(.|\n)*unused"),
        (lambda model: model.register_buffer("cells", torch.ones(3)), "lacks a buffer(.|\n)*cells(.|\n)*calls"),
        (lambda model: setattr(model.unused, "bias", torch.nn.Parameter(torch.ones(4))), r"\(3,\)(.|\n)*unused.bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_name(change, said, tmp_path):
    saved.train_and_save(0, str(tmp_path), [{"stage": 2}])
    model = saved.Buffered()
    change(model)
    training = Training({"stage": 2}, model)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*" + said):
        ballast.load_checkpoint(tmp_path / "0", training.model, training.optimizer)
    training.train(0, 1)


def test_a_part_of_a_model_is_refused_where_the_rest_of_it_is_partitioned_too(tmp_path):
    def training_of_a_part(stage):
        model = Tower()
        return model, ballast.wrap(torch.optim.AdamW(model.blocks[0].parameters()), model, stage=stage)

    model, optimizer = training_of_a_part(2)
    ballast.save(tmp_path, model.blocks, optimizer)
    model, optimizer = training_of_a_part(3)
    for does in (ballast.save, ballast.load_checkpoint):
        with pytest.raises(ballast.UsageError, match="B1001(.|\n)*position"):
            does(tmp_path, model.blocks, optimizer)
        Loop(steps=1).train(model, optimizer)


@pytest.mark.parametrize("kind", [Tower, Tall])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_without_memory_gets_its_numbers_from_a_checkpoint(stage, kind, tmp_path):
    """Also those of buffers, which a model with a running mean has."""
    one = Training({"stage": 2}, kind())
    one.train(0, 2)
    ballast.save(tmp_path, one.model, one.optimizer)
    with torch.device("meta"):
        model = kind()
    other = Training({"stage": stage}, model)
    ballast.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert same(one.everything(), other.everything())
    assert one.train(2, 2) == other.train(2, 2)


def test_buffers_without_memory_that_modules_share_are_shared_afterwards(tmp_path):
    one = Training({"stage": 2}, Tall())
    one.model.register_buffer("mean", one.model.norm.running_mean)
    one.train(0, 1)
    ballast.save(tmp_path, one.model, one.optimizer)
    with torch.device("meta"):
        model = Tall()
    model.register_buffer("mean", model.norm.running_mean)
    other = Training({"stage": 2}, model)
    ballast.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert model.mean is model.norm.running_mean
    assert torch.equal(model.mean, one.model.mean)


def test_a_buffer_without_memory_that_is_not_saved_is_named_before_anything_is_changed(tmp_path):
    one = Training({"stage": 2})
    one.optimizer.param_groups[0]["lr"] = 0.5
    ballast.save(tmp_path, one.model, one.optimizer)
    with torch.device("meta"):
        model = saved.Buffered()
    other = Training({"stage": 2}, model)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*table(.|\n)*ballast.deferred"):
        ballast.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert other.optimizer.param_groups[0]["lr"] == 1e-2
    assert model.mean.is_meta
    model.table = torch.arange(5)
    ballast.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert one.train(0, 2) == other.train(0, 2)
