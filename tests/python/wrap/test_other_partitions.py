"""Tests of new partitions, saves and reads while the parameters of an evaluation's last unit are still gathered."""

import copy
import weakref

import ballast
import pytest
import torch
from python.wrap.support.bodies import evaluated, freeze_a_layer, step_on_ones
from python.wrap.support.loops import Loop, Run, Tower, keywords, mlp
from python.wrap.support.models import UsedByMethod, small_batch


def freeze(model, optimizer, _):
    with ballast.gather(model):
        before = model[0].weight.clone()
    model[0].requires_grad_(False)
    step_on_ones(model, optimizer)
    with ballast.gather(model):
        assert torch.equal(model[0].weight, before)  # frozen from the first step on


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
    step_on_ones(model, optimizer)


def load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [freeze_a_layer, load])
def test_the_previous_plan_is_freed_when_another_is_made(change):
    model, optimizer = evaluated()
    before = weakref.ref(optimizer._ballast.current)
    change(model, optimizer)
    model(torch.ones(20)).square().sum().backward()
    assert before() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    optimizer.step()


def frozen_and_thawed(model, stage):
    """Return the parameters and their counts of steps after a long training whose partition has changed twice."""
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
    for trains in (True, False, True):
        model[0].requires_grad_(trains)
        for _ in range(131):
            model(torch.ones(20, dtype=torch.float32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = [float(optimizer.state[each]["step"]) for each in model.parameters()]
    optimizer.close()
    return [each.detach().clone() for each in model.parameters()], steps


@pytest.mark.parametrize("stage", [2, 3])
def test_the_default_format_of_torch_changes_nothing(stage):
    model, same = mlp(), mlp()
    parameters, steps = frozen_and_thawed(model, stage)
    torch.set_default_dtype(torch.bfloat16)
    try:
        other_parameters, other_steps = frozen_and_thawed(same, stage)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(parameters, other_parameters, strict=True))
    assert steps == other_steps
    assert max(steps) == 393  # bfloat16 has only even numbers there


def test_a_run_with_a_name_keeps_its_plan(tmp_path):
    model, optimizer = evaluated(offload=f"nvme:{tmp_path}", run="named")
    model[0].requires_grad_(False)
    with pytest.raises(ballast.UsageError, match='B1007 cannot train other parameters in the run "named"'):
        model(torch.ones(20))
    model[0].requires_grad_(True)  # the refusal has lost nothing
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2


@pytest.mark.parametrize("change", [freeze_a_layer, lambda model, optimizer: optimizer.close()], ids=["freeze", "close"])
def test_gathered_parameters_cannot_be_planned_anew(change):
    model, optimizer = evaluated()
    with ballast.gather(model):
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*0.weight(.|\n)*outside of `with ballast.gather"):
            change(model, optimizer)
            step_on_ones(model, optimizer)
    with ballast.gather(model):
        assert all(map(torch.equal, model.parameters(), before))
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2


def test_no_checkpoint_is_loaded_where_parameters_are_gathered(tmp_path):
    model, optimizer = evaluated()
    ballast.save(tmp_path, model, optimizer)
    with ballast.gather(model), pytest.raises(ballast.UsageError, match="B1007 cannot load (.*): parameters are gathered"):
        ballast.load_checkpoint(tmp_path, model, optimizer)
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2


def method_losses(stage):
    """Return the losses of a model that is never called. Its blocks freeze and thaw, and state is loaded on the way."""
    torch.manual_seed(0)
    model = UsedByMethod()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    losses = []
    for number in range(6):
        model.blocks.requires_grad_(number not in (2, 3))
        if number == 5:
            optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), lr=1e-2).state_dict())
        loss = model.loss(small_batch(number))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_is_never_called(stage):
    assert method_losses(stage) == pytest.approx(method_losses(None), rel=1e-5)


def test_a_backward_pass_of_a_previous_plan_is_refused():
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    loss = model(torch.ones(2, 20)).sum()
    optimizer.close()
    with pytest.raises(ballast.UsageError, match="B1007 cannot continue a backward pass"):
        loss.backward()


def in_other_groups(optimizer, parameters):
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": parameters[:1], "lr": 0.0})
    optimizer.add_param_group({"params": parameters[1:], "lr": 2e-2})


def in_reverse(optimizer, parameters):
    optimizer.param_groups.reverse()


def to_another_group(optimizer, parameters):
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop(0))


def into_one_group(optimizer, parameters):
    first, second = optimizer.param_groups
    first["params"] += second["params"]
    optimizer.param_groups.pop()


def regrouped(change, **options):
    """Return the trained parameters of a loop in which parameters change their groups."""
    loop, model = Loop(steps=2), mlp()
    first, *others = model.parameters()
    groups = [{"params": [first, others[0]], "lr": 1e-3}, {"params": others[1:], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
    loop.train(model, optimizer)
    change(optimizer, [first, *others])
    loop.steps = 4
    run = loop.train(model, optimizer, 2)
    with ballast.gather(model):
        return Run(model, optimizer, run.losses), run.parameters


@pytest.mark.parametrize("change", [in_other_groups, in_reverse, to_another_group, into_one_group])
@pytest.mark.parametrize(
    "options", [{"stage": 2}, {"stage": 3, "offload": "nvme:."}, {"stage": 2, "offload": "nvme:.", "run": "named"}], ids=str
)
def test_parameters_that_change_their_groups_have_the_options_of_the_new_ones(change, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, expected = regrouped(change)
    ours, found = regrouped(change, **options)
    assert ours.losses == pytest.approx(run.losses, rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("change", [in_reverse, to_another_group, into_one_group])
def test_groups_that_change_before_the_step_are_refused(change):
    model = mlp()
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:1], "lr": 1e-3}, {"params": parameters[1:]}]
    optimizer = ballast.wrap(torch.optim.AdamW(groups, lr=1e-2), model)
    model(torch.ones(20)).square().sum().backward()
    change(optimizer, parameters)
    with pytest.raises(ballast.UsageError, match="B1007 cannot make a step: optimizer.param_groups was changed between"):
        optimizer.step()
    optimizer.zero_grad()
    step_on_ones(model, optimizer)
    assert optimizer.steps == 1
