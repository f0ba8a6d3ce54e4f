"""Tests of partitions that cannot be made: values are kept where possible, and lost values are never trained with."""

import ballast
import pytest
import torch
from ballast import _core
from ballast.torch.parameters import units
from ballast.torch.parameters.deferred_parameters import InitialValueReader
from ballast.torch.training import partitioner
from ballast.torch.training.partition import Partition
from ballast.torch.training.partitioner import StateMigration
from ballast.torch.updates.rules import RuleUpdates
from python.wrap.support.bodies import evaluated, freeze_a_layer, step_on_ones
from python.wrap.support.loops import keywords, mlp


def fail_once(monkeypatch, owner, name):
    real = getattr(owner, name)

    def failing(*_, **__):
        monkeypatch.setattr(owner, name, real)
        raise MemoryError

    monkeypatch.setattr(owner, name, failing)


def fail(monkeypatch, model, owner=_core, name="Training"):
    fail_once(monkeypatch, owner, name)
    with pytest.raises(MemoryError):
        model(torch.ones(20))


def same(model, other):
    with ballast.gather(model), ballast.gather(other):
        return all(map(torch.equal, model.parameters(), other.parameters()))


FAILURES = [(StateMigration, "take_moments"), (_core, "Training"), (RuleUpdates, "keep_metadata")]


@pytest.mark.parametrize(
    "stage, failure", [*((stage, each) for stage in (2, 3) for each in FAILURES), (3, (partitioner, "ShardedParameters"))]
)
def test_a_plan_that_cannot_be_made_loses_nothing(stage, failure, monkeypatch):
    """The partition fails before anything of it exists, or after it has taken over the parameters."""

    def trained(fails):
        model, optimizer = evaluated(stage=stage)
        freeze_a_layer(model, optimizer)
        if fails:
            fail(monkeypatch, model, *failure)
        return model, optimizer

    (ours, closed), (undisturbed, other) = trained(True), trained(False)
    for _ in range(2):
        step_on_ones(undisturbed, other)
        step_on_ones(ours, closed)
    assert len(ours[0]._forward_pre_hooks) == len(undisturbed[0]._forward_pre_hooks)
    assert closed.steps == 3
    for optimizer in (closed, other):
        optimizer.close()
    assert same(ours, undisturbed)
    again, optimizer = trained(True)
    optimizer.close()
    assert all(torch.isfinite(each).all() for each in again.parameters())
    assert torch.equal(again[0].weight, ours[0].weight)  # frozen since the first step


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_that_could_not_be_written_are_written_later(stage, monkeypatch):
    def trained(fails):
        model, optimizer = evaluated(stage=stage)
        freeze_a_layer(model, optimizer)
        step_on_ones(model, optimizer)
        model[0].requires_grad_(True)
        if fails:
            fail(monkeypatch, model, Partition, "write_moments")
        step_on_ones(model, optimizer)
        assert optimizer.state[model[0].bias]["step"] == 2
        return model

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("stage", [2, 3])
def test_state_that_the_user_changes_after_a_failure_counts(stage, monkeypatch):
    """The other state of this parameter, and that of others, stays."""

    def trained(fails):
        model, optimizer = evaluated(stage=stage)
        step_on_ones(model, optimizer)
        model[0].requires_grad_(False)
        if fails:
            fail(monkeypatch, model)
        optimizer.state[model[2].weight]["exp_avg"] = torch.ones(model[2].weight.shape)
        step_on_ones(model, optimizer)
        return model

    unchanged, optimizer = evaluated(stage=stage)
    freeze_a_layer(unchanged, optimizer)
    assert same(trained(True), trained(False)) and not same(trained(True), unchanged)


def test_state_that_does_not_fit_is_refused_until_other_state_is_loaded():
    model, optimizer = evaluated()
    good = {number: dict(values) for number, values in torch.optim.AdamW(model.parameters()).state_dict()["state"].items()}
    bad = optimizer.state_dict()
    bad["state"] = {**bad["state"], 1: {**bad["state"][1], "exp_avg": torch.zeros(7)}}
    optimizer.load_state_dict(bad)
    for _ in range(2):
        with pytest.raises(ballast.UsageError, match="B1001 cannot load state of 7 elements(.|\n)*0.bias"):
            model(torch.ones(20))
    optimizer.load_state_dict({**bad, "state": good})
    step_on_ones(model, optimizer)
    assert optimizer.steps == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_values_loaded_after_a_failure_are_trained_with_the_previous_state(stage, monkeypatch, tmp_path):
    other, unneeded = evaluated()
    with torch.no_grad(), ballast.gather(other):
        other[0].weight.fill_(0.25)
        other[2].weight.fill_(0.5)
    ballast.export(other, tmp_path / "other.safetensors")

    def trained(fails):
        model, optimizer = evaluated(stage=stage)
        freeze_a_layer(model, optimizer)
        if fails:
            fail(monkeypatch, model)
        ballast.load(model, tmp_path / "other.safetensors")
        step_on_ones(model, optimizer)
        assert optimizer.steps == 2
        return model

    ours, undisturbed = trained(True), trained(False)
    assert same(ours, undisturbed)
    with ballast.gather(ours):
        assert torch.equal(ours[0].weight, torch.full((24, 20), 0.25))


def test_a_failed_load_keeps_the_parameters(monkeypatch, tmp_path):
    model, optimizer = evaluated()
    ballast.save(tmp_path, model, optimizer)
    with ballast.gather(model):
        before = [each.detach().clone() for each in model.parameters()]
    freeze_a_layer(model, optimizer)
    for _ in range(2):
        fail_once(monkeypatch, _core, "Training")
        with pytest.raises(MemoryError):
            ballast.load_checkpoint(tmp_path, model, optimizer)
    optimizer.close()
    assert all(map(torch.equal, model.parameters(), before))


def test_missing_values_are_not_trained_with(tmp_path):
    ballast.save(tmp_path, *evaluated())
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(20, 24), torch.nn.Tanh(), torch.nn.Linear(24, 5))
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3, memory="1KiB")
    with pytest.raises(ballast.OutOfMemoryError):
        ballast.load_checkpoint(tmp_path, model, optimizer)
    optimizer.close()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    with pytest.raises(ballast.UsageError, match="B1007 cannot begin to train(.|\n)*no values"):
        model(torch.ones(20))
    ballast.load_checkpoint(tmp_path, model, optimizer)
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2


@pytest.mark.parametrize("lost_in", [(Partition, "move_shards"), (StateMigration, "return_to_torch")])
def test_lost_values_are_not_trained_with(lost_in, monkeypatch, tmp_path):
    model, optimizer = evaluated()
    ballast.save(tmp_path, model, optimizer)
    freeze_a_layer(model, optimizer)
    fail(monkeypatch, model, *lost_in)
    for _ in range(2):
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*lost on the way(.|\n)*load_checkpoint"):
            model(torch.ones(20))
    ballast.load_checkpoint(tmp_path, model, optimizer)
    step_on_ones(model, optimizer)
    unfailing, other = evaluated()
    freeze_a_layer(unfailing, other)
    step_on_ones(unfailing, other)
    assert len(model[0]._forward_pre_hooks) == len(unfailing[0]._forward_pre_hooks)
    assert same(model, unfailing)


@pytest.mark.parametrize("stage", [2, 3])
def test_values_that_a_failed_start_has_freed_are_not_trained_with(stage, monkeypatch, tmp_path):
    """An interrupt, or a drive that fails, comes after the first units have left torch's memory."""
    monkeypatch.setattr(units, "UNIT_ELEMENTS", 1)  # below stage 3
    unfailing, other = evaluated(stage=stage)
    ballast.save(tmp_path, unfailing, other)
    model = mlp()
    options = {"units": "Linear"} if stage == 3 else {}
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(stage=stage, **options))
    read, seen = InitialValueReader.read, []

    def interrupted(self, parameter, *others):
        seen.append(parameter)
        if parameter is model[2].bias:
            raise KeyboardInterrupt
        read(self, parameter, *others)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(InitialValueReader, "read", interrupted)
        model(torch.ones(20))
    assert any(each is model[0].weight for each in seen)
    for _ in range(2):
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*lost on the way(.|\n)*load_checkpoint"):
            model(torch.ones(20))
    ballast.load_checkpoint(tmp_path, model, optimizer)
    for each in ((model, optimizer), (unfailing, other)):
        step_on_ones(*each)
    assert same(model, unfailing)


def test_values_that_a_partition_had_taken_are_not_saved(monkeypatch, tmp_path):
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    fail(monkeypatch, model, partitioner, "gathered_memory_for")
    for use in (lambda: model(torch.ones(20)), lambda: ballast.save(tmp_path, model, optimizer)):
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*lost on the way"):
            use()


def test_an_evaluation_in_inference_mode_leaves_trainable_parameters(monkeypatch):
    model, optimizer = evaluated()
    freeze_a_layer(model, optimizer)
    fail(monkeypatch, model)
    with torch.inference_mode(), ballast.gather(model):
        model[0].weight.sum()
    model[0].requires_grad_(True)
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2
