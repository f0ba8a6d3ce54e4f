"""Tests of calls after optimizer.close(): those that need the state are refused, and all others are harmless."""

import gc
from contextlib import nullcontext

import ballast
import pytest
import torch
from ballast.torch.updates import sharded_state
from python.wrap.support.loops import Tower, keywords, mean_square, mlp
from python.wrap.support.ranks import run_ranks

CONFIGURATIONS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "offload": "host"},
    {"stage": 3},
    {"stage": 3, "offload": "nvme"},
    {"stage": 3, "update_in_backward": True},
]
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)


def take_step(model, optimizer):
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    optimizer.zero_grad()


def begun(configuration, folder, steps=2, make=torch.optim.AdamW):
    if configuration.get("offload") == "nvme":
        configuration = {**configuration, "offload": f"nvme:{folder}"}
    model = Tower()
    optimizer = ballast.wrap(make(model.parameters(), lr=1e-2), model, **keywords(**configuration))
    for _ in range(steps):
        take_step(model, optimizer)
    return model, optimizer


def closed(*given, **options):
    model, optimizer = begun(*given, **options)
    optimizer.close()
    return model, optimizer


def calls(model, optimizer, folder):
    """Return by name the calls that need the state or the other ranks."""
    group = {"params": [torch.nn.Parameter(torch.ones(3))]}
    return {
        "step()": optimizer.step,
        "step() with a closure": lambda: optimizer.step(lambda: pytest.fail("it was called")),
        "clip_grad_norm_()": lambda: optimizer.clip_grad_norm_(1.0),
        "add_param_group()": lambda: optimizer.add_param_group(group),
        "state_dict()": optimizer.state_dict,
        "load_state_dict()": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "memory()": optimizer.memory,
        "on_any_rank()": lambda: optimizer.on_any_rank(False),
        "write_timeline()": lambda: optimizer.write_timeline(folder / "timeline"),
        "offload()": optimizer.offload,
        "reload()": optimizer.reload,
        "save()": lambda: ballast.save(folder / "saved", model, optimizer),
        "load_checkpoint()": lambda: ballast.load_checkpoint(folder / "saved", model, optimizer),
        "wrap()": lambda: ballast.wrap(optimizer, model),
    }


def test_the_norm_of_a_gradient_that_a_caller_has_kept_is_refused():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    mean_square(model, torch.ones(20)).backward()
    kept = next(model.parameters()).grad
    model.zero_grad()
    optimizer.close()
    with pytest.raises(ballast.UsageError, match="B1007 cannot compute the norm of a gradient: its training has ended"):
        kept.norm()


@every_configuration
def test_calls_that_need_the_state_are_refused_after_close(configuration, tmp_path):
    model, optimizer = closed(configuration, tmp_path)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for name, call in calls(model, optimizer, tmp_path).items():
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*closed(.|\n)*new optimizer") as refused:
            call()
        assert name.split(" ")[0] in refused.value.what_happened
    assert list(tmp_path.iterdir()) == []
    assert len(optimizer.param_groups) == 1
    assert all(map(torch.equal, before, model.parameters()))


@every_configuration
def test_calls_that_change_nothing_are_harmless_after_close(configuration, tmp_path):
    model, optimizer = closed(configuration, tmp_path)
    assert optimizer.metrics()["step"] == 2.0
    assert optimizer.steps == 2
    mean_square(model, torch.ones(20)).backward()
    assert type(model.last.weight.grad) is torch.Tensor  # a plain gradient of torch
    with optimizer.no_sync(), ballast.gather(model):
        pass
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.close()
    ballast.export(model, tmp_path / "model.safetensors")


def test_a_state_dict_from_before_close_keeps_its_values():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=2)
    take_step(model, optimizer)
    saved = optimizer.state_dict()
    moment = saved["state"][0]["exp_avg"].clone()
    optimizer.close()
    assert torch.equal(torch.clone(saved["state"][0]["exp_avg"]), moment)


def test_an_optimizer_is_closed_before_it_has_trained():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    optimizer.close()
    assert (optimizer.steps, optimizer.metrics()) == (0, {})
    with pytest.raises(ballast.UsageError, match="B1007 cannot call step.* closed"):
        optimizer.step()


@every_configuration
def test_a_new_optimizer_takes_over_from_one_that_is_closed(configuration, tmp_path):
    model, old = closed(configuration, tmp_path)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_step(model, plain)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=configuration["stage"])
    take_step(model, optimizer)
    assert (old.steps, optimizer.steps) == (2, 1)
    with pytest.raises(ballast.UsageError, match="B1007 cannot call step.* closed"):
        old.step()
    old.close()
    old.zero_grad()
    take_step(model, optimizer)


def test_an_optimizer_with_its_own_step_is_closed_too(tmp_path):
    model, optimizer = closed({"stage": 2}, tmp_path, make=torch.optim.RMSprop)
    assert optimizer.steps == 2
    with pytest.raises(ballast.UsageError, match="B1007 cannot call step.* closed"):
        optimizer.step()


# --- Parameters that do not fit in torch's memory ---


@every_configuration
def test_a_training_ends_without_its_parameters_and_a_checkpoint_brings_them(tmp_path, configuration, monkeypatch):
    model, optimizer = begun(configuration, tmp_path)
    ballast.save(tmp_path / "saved", model, optimizer)
    monkeypatch.setattr(sharded_state, "available_memory", lambda _: 0)
    optimizer.close(gather=False)
    with pytest.raises(ballast.UsageError, match="its optimizer is gone(.|\n)*a model that is constructed again"):
        model(torch.ones(20))
    monkeypatch.undo()

    model, optimizer = begun(configuration, tmp_path, steps=0)
    ballast.load_checkpoint(tmp_path / "saved", model, optimizer)
    take_step(model, optimizer)
    optimizer.close()
    expected, _ = closed(configuration, tmp_path, steps=3)
    assert all(map(torch.equal, expected.parameters(), model.parameters()))


@every_configuration
def test_closing_is_refused_where_parameters_do_not_fit(tmp_path, configuration, monkeypatch):
    expected, _ = closed(configuration, tmp_path, steps=3)
    model, optimizer = begun(configuration, tmp_path)
    monkeypatch.setattr(sharded_state, "available_memory", lambda _: 1000)
    with pytest.raises(ballast.OutOfMemoryError, match="cannot close(.|\n)*1000 B(.|\n)*close.gather=False") as raised:
        optimizer.close()
    assert raised.value.code == "B2004"
    take_step(model, optimizer)  # nothing was changed
    monkeypatch.undo()
    optimizer.close()
    assert all(map(torch.equal, expected.parameters(), model.parameters()))


def test_a_deleted_optimizer_does_not_gather_what_does_not_fit(tmp_path, monkeypatch, caplog):
    model, optimizer = begun({"stage": 3}, tmp_path)
    monkeypatch.setattr(sharded_state, "available_memory", lambda _: 1000)
    del optimizer
    gc.collect()
    assert "the parameters lose their values" in caplog.text
    with pytest.raises(ballast.UsageError, match="its optimizer is gone"):
        model(torch.ones(20))


def closed_by_ranks(rank, short, gathers):
    """Return what close() raises where only rank `short` lacks memory, and whether all values are there after another one."""
    model, optimizer = begun({"stage": 3}, None)
    before = sharded_state.available_memory
    sharded_state.available_memory = lambda found: 0 if rank == short else before(found)
    with pytest.raises(ballast.Error) as raised:
        optimizer.close()
    sharded_state.available_memory = before
    optimizer.close(gather=gathers)
    with pytest.raises(ballast.UsageError) if not gathers else nullcontext():
        model(torch.ones(20))
    return raised.value.code


@pytest.mark.parametrize("gathers", [True, False])
def test_no_rank_gathers_where_one_has_too_little_memory(gathers):
    assert run_ranks(2, closed_by_ranks, 1, gathers) == ["B2004", "B2004"]
