"""What is trained changes, or is looked at, where a unit's parameters are still in memory: the last one's of an evaluation."""

import copy
import weakref

import ballast
import pytest
import torch
from ballast import _core
from ballast.wrapper import session
from ballast.wrapper.partition import Partition
from python.wrap import uncommon
from python.wrap.loops import Tower, mlp


def evaluated(**options):
    """A model that has trained for a step, and was evaluated: in stage 3 its last unit is gathered."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, units="Linear", **options)
    step(model, optimizer)
    with torch.no_grad():
        model(torch.ones(20))
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(20)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def freeze(model, optimizer, _):
    with ballast.gather(model):
        before = model[0].weight.clone()
    model[0].requires_grad_(False)
    step(model, optimizer)
    with ballast.gather(model):
        assert torch.equal(model[0].weight, before)  # already in the first step


@pytest.mark.parametrize(
    "look",
    [
        lambda model, optimizer, folder: ballast.save(folder / "saved", model, optimizer),
        lambda model, optimizer, folder: torch.save(optimizer.state_dict(), folder / "state.pt"),
        lambda model, optimizer, folder: optimizer.write_timeline(folder / "timeline.json"),
        lambda model, optimizer, folder: (optimizer.offload(), optimizer.reload()),
        freeze,
    ],
    ids=["save", "state_dict", "write_timeline", "offload", "freeze"],
)
def test_after_an_evaluation(look, tmp_path):
    model, optimizer = evaluated(timeline=True)
    look(model, optimizer, tmp_path)
    step(model, optimizer)


def freeze_a_layer(model, optimizer):
    model[0].requires_grad_(False)


def load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [freeze_a_layer, load])
def test_what_was_before_is_gone_when_another_plan_is_made(change):
    model, optimizer = evaluated()
    before = weakref.ref(optimizer._ballast._partition)
    change(model, optimizer)
    model(torch.ones(20)).square().sum().backward()
    assert before() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    optimizer.step()


def test_a_run_with_a_name_keeps_its_plan(tmp_path):
    model, optimizer = evaluated(offload=f"nvme:{tmp_path}", run="named")
    model[0].requires_grad_(False)
    with pytest.raises(ballast.UsageError, match='B1007 other parameters were to be trained in the run "named"'):
        model(torch.ones(20))
    model[0].requires_grad_(True)  # and nothing is lost
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    assert optimizer.steps == 2


@pytest.mark.parametrize("stage, fails_at", [(2, "Training"), (3, "Training"), (3, "Window")])
def test_a_plan_that_cannot_be_made_loses_nothing(stage, fails_at, monkeypatch):
    """Before anything of it is there, or when parameters are in it already."""

    def trained(fails):
        model = mlp()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
        step(model, optimizer)
        freeze_a_layer(model, optimizer)
        if fails:
            fail_once(monkeypatch, _core if fails_at == "Training" else session, fails_at)
            with pytest.raises(MemoryError):
                model(torch.ones(20))
        return model, optimizer

    (ours, closed), (undisturbed, other) = trained(True), trained(False)
    step(undisturbed, other)
    step(ours, closed)
    for optimizer in (closed, other):
        optimizer.close()
    assert all(map(torch.equal, ours.parameters(), undisturbed.parameters()))
    again, optimizer = trained(True)
    optimizer.close()
    assert all(torch.isfinite(each).all() for each in again.parameters())
    assert torch.equal(again[0].weight, ours[0].weight)  # frozen since the first step


def test_numbers_that_were_lost_on_the_way_to_a_plan_are_not_trained_with(monkeypatch, tmp_path):
    model, optimizer = evaluated()
    ballast.save(tmp_path, model, optimizer)
    freeze_a_layer(model, optimizer)
    fail_once(monkeypatch, Partition, "change_parts")
    with pytest.raises(MemoryError):
        model(torch.ones(20))
    for _ in range(2):
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*lost on the way(.|\n)*load_checkpoint"):
            model(torch.ones(20))
    ballast.load_checkpoint(tmp_path, model, optimizer)
    step(model, optimizer)
    unfailing, other = evaluated()
    freeze_a_layer(unfailing, other)
    step(unfailing, other)
    assert len(model[0]._forward_pre_hooks) == len(unfailing[0]._forward_pre_hooks)
    with ballast.gather(model), ballast.gather(unfailing):
        assert all(map(torch.equal, model.parameters(), unfailing.parameters()))


def fail_once(monkeypatch, owner, name):
    real = getattr(owner, name)

    def failing(*_, **__):
        monkeypatch.setattr(owner, name, real)
        raise MemoryError

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("change", [freeze_a_layer, lambda model, optimizer: optimizer.close()], ids=["freeze", "close"])
def test_what_is_gathered_cannot_be_planned_anew(change):
    model, optimizer = evaluated()
    with ballast.gather(model):
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*0.weight(.|\n)*outside of `with ballast.gather"):
            change(model, optimizer)
            step(model, optimizer)
    with ballast.gather(model):
        assert all(map(torch.equal, model.parameters(), before))
    step(model, optimizer)


def method_losses(stage):
    """Of a model that is never called: its first block is frozen and thawed, and state is loaded on the way."""
    torch.manual_seed(0)
    model = uncommon.UsedByMethod()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    losses = []
    for number in range(6):
        model.blocks.requires_grad_(number not in (2, 3))
        if number == 5:
            optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), lr=1e-2).state_dict())
        loss = model.loss(uncommon.batch(number))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_is_never_called(stage):
    assert method_losses(stage) == pytest.approx(method_losses(None), rel=1e-5)


def test_a_backward_pass_of_before_says_what_is_wrong():
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    loss = model(torch.ones(2, 20)).sum()
    optimizer.close()
    with pytest.raises(ballast.UsageError, match="B1007 a backward pass was to go on after"):
        loss.backward()
