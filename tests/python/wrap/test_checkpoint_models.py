"""Tests of checkpoints of models that differ, have no memory, are compiled, or are wrapped by other modules."""

from __future__ import annotations

from functools import partial

import ballast
import pytest
import torch
from ballast.checkpoint import manifest
from python.wrap.support import saved
from python.wrap.support.loops import Loop, Tower, mlp
from python.wrap.support.models import Tall
from python.wrap.support.ranks import run_ranks
from python.wrap.support.saved import Training, Values, same


def saves_in_data_parallelism(rank: int, folder: str, stage: int) -> Values:
    """Train and save a DDP module around the model, as Accelerate and Trainer do."""
    training = Training({"stage": stage})
    around = torch.nn.parallel.DistributedDataParallel(training.model)
    training.loop.steps = 2
    training.loop.train(around, training.optimizer)
    ballast.save(f"{folder}/saved", around, training.optimizer)
    ballast.export(around, f"{folder}/model.safetensors")
    return training.everything()


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
def test_a_meta_model_gets_its_values_from_a_checkpoint(stage, kind, tmp_path):
    """A model on the meta device gets its parameters and its buffers, such as a running mean, from a checkpoint."""
    one = Training({"stage": 2}, kind())
    one.train(0, 2)
    ballast.save(tmp_path, one.model, one.optimizer)
    with torch.device("meta"):
        model = kind()
    other = Training({"stage": stage}, model)
    ballast.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert same(one.everything(), other.everything())
    assert one.train(2, 2) == other.train(2, 2)


def test_shared_meta_buffers_are_shared_after_loading(tmp_path):
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


def test_a_meta_buffer_that_is_not_saved_is_named_before_any_change(tmp_path):
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


def compiled(model):
    """Compile a block and then the model around it, as users do."""
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("stage", [2, 3])
def test_names_are_the_same_in_data_parallelism_and_without(stage, tmp_path):
    expected, _ = run_ranks(2, saves_in_data_parallelism, str(tmp_path), stage)
    alone = Training({"stage": 2})
    ballast.load_checkpoint(tmp_path / "saved", alone.model, alone.optimizer)
    assert same(alone.everything(), expected)
    alone = saved.other_parameters(saved.Buffered())
    ballast.load(alone, tmp_path / "model.safetensors")
    assert same(dict(alone.state_dict()), expected)


@pytest.mark.parametrize("configuration", [{}, {"optimizer": "NAdam"}], ids=["rule", "own step"])
@pytest.mark.parametrize("stage", [2, 3])
def test_names_are_the_same_compiled_and_not(stage, configuration, tmp_path):
    one, other = Training({"stage": stage, **configuration}), Training({"stage": stage, **configuration})
    one.train(0, 2)
    expected = one.everything()
    around = compiled(one.model)
    ballast.save(tmp_path / "saved", around, one.optimizer)
    assert not [name for name in manifest.read(tmp_path / "saved").tensors if "_orig_mod" in name]
    ballast.load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
    assert same(other.everything(), expected)
    ballast.export(around, tmp_path / "model.safetensors")
    alone = saved.other_parameters(saved.Buffered())
    ballast.load(alone, tmp_path / "model.safetensors")
    assert same(dict(alone.state_dict()), expected)
    for load in (
        partial(ballast.load, around, tmp_path / "model.safetensors"),
        partial(ballast.load_checkpoint, tmp_path / "saved", around, one.optimizer),
    ):
        with ballast.gather(one.model):
            saved.other_parameters(one.model)
        load()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.everything().values(), expected.values()))


def test_an_error_names_a_parameter_without_the_names_of_wrappers(tmp_path):
    model = compiled(Tower())
    model.position.data = model.position.data.double()
    with pytest.raises(ballast.UsageError, match="float64(.|\n)*parameter position"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), model)


class DataParallelStandIn(torch.nn.Module):
    """Stands in for DistributedDataParallel, which begins all names with `module.`."""

    def __init__(self, model):
        super().__init__()
        self.module = model


@pytest.mark.parametrize("configuration", [{}, {"optimizer": "NAdam"}], ids=["rule", "own step"])
def test_a_checkpoint_with_the_names_of_a_wrapper_is_read(configuration, tmp_path):
    one = Training({"stage": 2, **configuration})
    other = Training({"stage": 3, **configuration}, saved.other_parameters(saved.Buffered()))
    for training in (one, other):
        training.train(0, 1)
        training.model.blocks[3].requires_grad_(False)  # its moments are saved under names of their own
    one.train(1, 1)
    ballast.save(tmp_path, DataParallelStandIn(one.model), one.optimizer)
    assert "module.blocks.3.up.weight: exp_avg" in manifest.read(tmp_path).tensors
    ballast.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert same(other.everything(), one.everything())
    ballast.load_checkpoint(tmp_path, DataParallelStandIn(one.model), one.optimizer)
    for training in (one, other):
        training.model.blocks[3].requires_grad_(True)
    assert one.train(2, 2) == other.train(2, 2)


def test_a_checkpoint_of_another_model_is_not_replaced(tmp_path):
    one, other = Training({"stage": 2}), Training({"stage": 3}, mlp())
    ballast.save(tmp_path, one.model, one.optimizer)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*another model(.|\n)*one directory for each"):
        ballast.save(tmp_path, other.model, other.optimizer)
    assert sorted(tmp_path.rglob("*")) == before
    other.train(0, 1)
    one.optimizer.close()
    del one.model.blocks[3], one.model.unused  # a changed model with names in common may replace it
    smaller = Training({"stage": 2}, one.model)
    ballast.save(tmp_path, smaller.model, smaller.optimizer)
    assert "unused.weight" not in manifest.read(tmp_path).tensors


def test_a_checkpoint_with_the_names_of_a_wrapper_is_replaced(tmp_path):
    training = Training({"stage": 2})
    ballast.save(tmp_path, DataParallelStandIn(training.model), training.optimizer)
    ballast.save(tmp_path, training.model, training.optimizer)
    assert "position" in manifest.read(tmp_path).tensors
