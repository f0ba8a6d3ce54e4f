"""Tests of overlap_gathers: a module waits for its own parameters before it runs, and other readers wait for all of them."""

import ballast
import pytest
import torch
from ballast import _core
from ballast.wrapper.overlapped_gathers import OverlappedGathers
from ballast.wrapper.units import Member, UnitOfMembers, numbered


class Waits:
    """In place of the library's training: notes what is waited for."""

    def __init__(self):
        self.log = []

    def wait_for_parameters(self, unit):
        self.log.append(unit)

    def finish(self):
        self.log.append("all")


class Noting(torch.nn.Linear):
    def __init__(self, name, log):
        super().__init__(2, 2, bias=False)
        self.name, self.log = name, log

    def forward(self, x):
        self.log.append(self.name)
        return super().forward(x)


class Model(torch.nn.Module):
    """Calls two modules, and uses the parameter of a third one, if it is told so, without calling it."""

    def __init__(self, log, borrows=()):
        super().__init__()
        self.first, self.second, self.lender = (Noting(name, log) for name in ("first", "second", "lender"))
        self.borrows = list(borrows)

    def forward(self, x):
        y = self.second(self.first(x))
        return y @ self.lender.weight if self.borrows.pop(0) else y


def overlapped(model, core):
    """Return the object of a training in which each parameter is a unit."""
    units = numbered([UnitOfMembers(torch.float32, [Member(each, name, 0)]) for name, each in model.named_parameters()])
    return OverlappedGathers(model, _core.TrainingOptions(), core, units)


def used(gathers, model):
    for name, each in model.named_parameters():
        if each.grad is not None:
            gathers.require_used_in_call(each, name)
            each.grad = None


def test_each_module_waits_for_its_own_parameters_once_in_a_step():
    core = Waits()
    model = Model(core.log, borrows=[False] * 4)
    gathers = overlapped(model, core)
    model(torch.ones(2))
    assert core.log == ["first", "second"]  # nothing is under way before the first step
    for _ in range(2):
        core.log.clear()
        gathers.begin()
        model(torch.ones(2))
        assert core.log == [0, "first", 1, "second"]
    core.log.clear()
    model(torch.ones(2))  # another backward pass of the same step
    assert core.log == ["first", "second"]


def test_what_the_first_step_uses_outside_of_calls_is_waited_for_when_the_model_is_called():
    core = Waits()
    model = Model(core.log, borrows=[True, True])
    gathers = overlapped(model, core)
    model(torch.ones(2)).sum().backward()
    used(gathers, model)
    gathers.begin()
    core.log.clear()
    model(torch.ones(2)).sum().backward()
    assert core.log == [2, 0, "first", 1, "second"]
    used(gathers, model)


def test_a_later_use_outside_of_calls_is_refused():
    core = Waits()
    model = Model(core.log, borrows=[False, True])
    gathers = overlapped(model, core)
    model(torch.ones(2)).sum().backward()
    used(gathers, model)
    gathers.begin()
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ballast.Error, match=r"outside the calls of its module.*\n.*lender.weight") as raised:
        used(gathers, model)
    assert "overlap_gathers=False" in str(raised.value)


def test_a_state_dict_waits_for_all_parameters():
    core = Waits()
    model = Model(core.log)
    gathers = overlapped(model, core)
    gathers.begin()
    model.second.state_dict()
    assert core.log == ["all"]
    gathers.remove()
    gathers.begin()
    model.state_dict()
    assert core.log == ["all"]


def test_gathering_and_writes_wait_for_all_parameters():
    model = torch.nn.Linear(2, 2)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model, overlap_gathers=True)
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with ballast.gather(model):
            before = model.weight.detach().clone()
            with torch.no_grad():
                model.weight.mul_(2)
    assert torch.equal(model.weight, 2 * before)
    optimizer.close()


@pytest.mark.parametrize("parameters", [True, False])
def test_an_offloaded_training_has_all_parameters(parameters):
    model = torch.nn.Linear(2, 2)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model, overlap_gathers=True)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.offload(parameters=parameters)
    if not parameters:
        with torch.no_grad():
            model(torch.ones(2))
    optimizer.reload()
    with torch.no_grad():
        model(torch.ones(2))
    optimizer.close()


def test_a_model_is_needed():
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(ballast.Error, match="cannot overlap gathers without a model"):
        ballast.wrap(plain, overlap_gathers=True)
    assert type(plain) is torch.optim.AdamW
