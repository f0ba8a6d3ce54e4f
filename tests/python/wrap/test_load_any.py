"""Tests of ballast.load() with the checkpoints of trainings: it takes the weights, without an optimizer."""

from __future__ import annotations

import logging

import ballast
import pytest
import torch
from python.wrap.support import saved
from python.wrap.support.loops import Loop
from python.wrap.support.models import Tall
from python.wrap.support.ranks import run_ranks
from python.wrap.support.saved import Buffered, Values
from python.wrap.test_foreign import as_distributed, as_universal, as_universal_of_stage_3
from torch.distributed import checkpoint as dcp


def loads_weights(rank: int, folder: str) -> Values:
    """Load the weights of a checkpoint into a deferred model in stage 3."""
    with ballast.deferred():
        model = Buffered()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    ballast.load(model, folder)
    optimizer.memory()
    with ballast.gather(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def as_ballast(folder, run):
    ballast.save(folder, run.model, run.optimizer)


def as_model_only(folder, run):
    dcp.save(run.model.state_dict(), checkpoint_id=folder, no_dist=True)


KINDS = {
    "ballast": as_ballast,
    "distributed": as_distributed,
    "model only": as_model_only,
    "universal": as_universal,
    "universal of stage 3": as_universal_of_stage_3,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of one training's checkpoints by kind, and its model's state_dict()."""
    plain = Loop(make_model=Tall, steps=2).run()
    wrapped = Loop(make_model=Tall, steps=2)
    model = Tall()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=2)
    wrapped.train(model, optimizer)
    model.load_state_dict(plain.model.state_dict())
    folders = {kind: tmp_path_factory.mktemp("checkpoints") for kind in KINDS}
    for kind, writes in KINDS.items():
        if kind == "ballast":
            ballast.save(folders[kind], model, optimizer)
        else:
            writes(folders[kind], plain)
    return folders, {name: value.clone() for name, value in plain.model.state_dict().items()}


def other_model():
    torch.manual_seed(9)
    return Tall()


def plain(folder):
    model = other_model()
    ballast.load(model, folder)
    return model


def deferred(folder):
    with ballast.deferred():
        model = Tall()
    ballast.load(model, folder)
    ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3).memory()
    return model


def wrapped(folder):
    model = other_model()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    optimizer.memory()
    ballast.load(model, str(folder))
    return model


@pytest.mark.parametrize("where", [plain, deferred, wrapped])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_any_checkpoint_are_loaded(kind, where, runs):
    folders, expected = runs
    model = where(folders[kind])
    held = {name for name, _ in other_model().named_parameters()} if "universal" in kind else set(expected)
    with ballast.gather(model):
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            assert name not in held or torch.equal(value, expected[name]), name


def test_what_a_universal_checkpoint_lacks_stays(runs, caplog):
    folders, _ = runs
    model = other_model()
    before = {name: value.clone() for name, value in model.named_buffers()}
    with caplog.at_level(logging.WARNING, "ballast"):
        ballast.load(model, folders["universal"])
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert "norm.running_mean" in caplog.text
    with torch.device("meta"):
        bare = Tall()
    with pytest.raises(ballast.UsageError, match="B1001 cannot load a model with a buffer on the meta device"):
        ballast.load(bare, folders["universal"])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_to_the_models_format(kind, runs):
    folders, expected = runs
    model = other_model().to(torch.bfloat16)
    ballast.load(model, folders[kind])
    assert all(torch.equal(value, expected[name].to(torch.bfloat16)) for name, value in model.named_parameters())


def test_a_model_in_fp32_gets_the_masters(tmp_path):
    """In each state format, the parameters of a bf16 training are loaded as they are, or with their masters in fp32."""
    for state_format in ("fp32", "split", "compact", "4bit"):
        training = saved.Training({"stage": 2, "dtype": torch.bfloat16, "state_format": state_format})
        training.train(0, 2)
        ballast.save(tmp_path / state_format, training.model, training.optimizer)
        same, exact = saved.Buffered().to(torch.bfloat16), saved.Buffered()
        ballast.load(same, tmp_path / state_format)
        assert saved.same(same.state_dict(), training.everything())
        ballast.load(exact, tmp_path / state_format)
        masters = saved.values_in(tmp_path / state_format)
        for name, value in exact.named_parameters():
            assert torch.equal(value, masters[name]), name
        assert any((value.to(torch.bfloat16).float() != value).any() for value in exact.parameters())


@pytest.mark.parametrize("kind", ["ballast", "distributed", "model only", "universal"])
def test_weights_of_another_model_are_refused(kind, runs):
    folders, _ = runs
    model = other_model()
    model.more = torch.nn.Linear(3, 3)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*more"):
        ballast.load(model, folders[kind])
    less = other_model()
    less.blocks = less.blocks[:-1]
    with pytest.raises(ballast.UsageError, match=r"B1001(.|\n)*not in the model, such as blocks\."):
        ballast.load(less, folders[kind])


def test_ranks_load_their_shards_of_what_other_ranks_saved(tmp_path):
    [values, _] = run_ranks(2, saved.train_and_save, str(tmp_path), [{"stage": 3}])
    for everything in run_ranks(3, loads_weights, str(tmp_path / "0")):
        assert saved.same(everything, values[0])
