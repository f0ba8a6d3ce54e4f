"""Tests of overlap_gathers: each use of a parameter after a step waits until it is updated and gathered."""

import ballast
import pytest
import torch
from ballast import _core
from ballast.errors import FailureError
from ballast.torch.parameters import overlapped_gathers
from ballast.torch.parameters.overlapped_gathers import AwaitedParameter, OverlappedGathers
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, numbered
from python.wrap.support import overlapping
from python.wrap.support.keywords import keywords
from python.wrap.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process may have compiled code."""
    monkeypatch.setattr(overlapped_gathers, "has_compiled", lambda: False)


class Waits:
    """A training that records what it is asked to wait for, and trains nothing."""

    def __init__(self):
        self.log = []
        self.fails = False

    def wait_for_parameters(self, unit):
        self.log.append(unit)

    def finish(self):
        if self.fails:
            raise FailureError("planted")
        self.log.append("all")


class Noting(torch.nn.Linear):
    def __init__(self, name, log):
        super().__init__(2, 2, bias=False)
        self.name, self.log = name, log

    def forward(self, x):
        self.log.append(self.name)
        return super().forward(x)


def begun():
    """Return two modules, in a training in which each is a unit, after a step."""
    core = Waits()
    model = torch.nn.Sequential(Noting("first", core.log), Noting("second", core.log))
    members = [ParameterUnit(torch.float32, [UnitParameter(each, name, 0)]) for name, each in model.named_parameters()]
    gathers = OverlappedGathers(model, _core.TrainingOptions(), core, numbered(members))
    gathers.begin()
    return model, gathers, core


def are_plain(model):
    return all(type(each) is torch.nn.Parameter and vars(each) == {} for each in model.parameters())


@pytest.mark.parametrize("stage", [0, 2])
def test_every_use_waits_for_held_gathers(stage):
    for uses in run_ranks(2, overlapping.used_while_held, stage):
        for name, (expected, found) in uses.items():
            assert len(expected) == len(found)
            assert all(map(torch.equal, expected, found)), name


def test_a_compiled_model_waits_for_held_gathers():
    for expected, found in run_ranks(2, overlapping.compiled_while_held):
        assert all(map(torch.equal, expected, found))


def test_a_training_that_failed_while_it_gathered_can_be_closed():
    for parameters in run_ranks(2, overlapping.closed_after_a_failure):
        assert all(torch.isfinite(each).all() for each in parameters)


def test_each_module_waits_for_its_own_parameters_once_in_a_step():
    model, gathers, core = begun()
    for _ in range(2):
        core.log.clear()
        model(torch.ones(2))
        assert core.log == [0, "first", 1, "second"]
        model(torch.ones(2))  # another backward pass of the same step
        assert core.log[4:] == ["first", "second"]
        gathers.begin()


def test_a_module_waits_before_the_hooks_that_it_had():
    core, model = Waits(), torch.nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda *_: core.log.append("its hook"))
    unit = ParameterUnit(torch.float32, [UnitParameter(model.weight, "weight", 0)])
    gathers = OverlappedGathers(model, _core.TrainingOptions(), core, [unit])
    gathers.begin()
    model(torch.ones(2))
    assert core.log == [0, "its hook"]


def test_questions_that_need_no_values_do_not_wait():
    model, _, core = begun()
    weight = model[0].weight
    weight.requires_grad_(False).requires_grad_(True)
    weight.grad = torch.ones(2, 2)
    assert (weight.shape, weight.numel(), weight.dtype, weight.is_leaf) == ((2, 2), 4, torch.float32, True)
    model.zero_grad()
    assert core.log == []
    assert type(weight) is AwaitedParameter


def test_parameters_deep_in_the_arguments_wait_too():
    model, _, core = begun()
    torch.nn.functional.linear(input=torch.ones(2), weight=model[1].weight)
    torch.stack([model[0].weight, model[1].weight])
    assert core.log == [1, 0]
    assert are_plain(model)


def test_parameters_may_still_be_pending_when_a_step_returns():
    model, gathers, core = begun()
    gathers.begin()
    gathers.finish()
    assert core.log == ["all"]
    assert are_plain(model)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_leaves_a_plain_model(fails):
    model, gathers, core = begun()
    core.fails = fails
    if fails:
        with pytest.raises(FailureError, match="planted"):
            gathers.end()
    else:
        gathers.end()
    assert are_plain(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_steps_wait_from_the_first_compiled_code_on():
    model, gathers, core = begun()
    torch.compile(lambda: model[1].weight * 2, backend="eager")()
    assert core.log == ["all"]
    gathers.begin()
    assert core.log == ["all", "all"]
    assert all(type(each) is torch.nn.Parameter for each in model.parameters())  # torch has marked the weight


def test_steps_wait_if_code_was_compiled_before(monkeypatch):
    monkeypatch.setattr(overlapped_gathers, "has_compiled", lambda: True)
    model, _, core = begun()
    assert core.log == ["all"]
    assert are_plain(model)


def test_steps_wait_after_a_graph_was_captured(monkeypatch):
    model, gathers, core = begun()
    gathers.finish()
    monkeypatch.setattr(overlapped_gathers, "is_capturing", lambda _: True)
    model(torch.ones(2))
    monkeypatch.setattr(overlapped_gathers, "is_capturing", lambda _: False)
    core.log.clear()
    gathers.begin()
    assert core.log == ["all"]


def test_no_graph_is_captured_while_parameters_are_gathered(monkeypatch):
    model, _, core = begun()
    monkeypatch.setattr(overlapped_gathers, "is_capturing", lambda _: True)
    with pytest.raises(ballast.UsageError, match="cannot capture a CUDA graph(.|\n)*ballast.gather"):
        model(torch.ones(2))
    assert core.log == []


def test_a_block_waits_for_all_that_is_inside_of_it():
    core = Waits()
    blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Tanh()) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.ModuleList(blocks))
    units = [ParameterUnit(torch.float32, [UnitParameter(each, name, 0)]) for name, each in model.named_parameters()]
    gathers = OverlappedGathers(model, _core.TrainingOptions(), core, numbered(units))
    gathers.begin()
    blocks[1].register_forward_pre_hook(lambda *_: core.log.append("inside"))
    blocks[1](torch.ones(2))
    assert core.log == [1, "inside"]


@pytest.mark.parametrize("given, stage, expected", [(None, 2, True), (None, 0, True), (False, 2, False)])
def test_gathers_overlap_by_themselves_where_ranks_share_a_model(given, stage, expected):
    for overlapped in run_ranks(2, overlapping.overlaps, stage, given):
        assert overlapped == [expected, bool(given)]


def test_gathers_of_one_rank_need_no_overlap():
    assert overlapping.overlaps(0, 2, None) == [False, False]


def wrapped(**options):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model, **keywords(**options))


def test_assigned_gradients_are_taken():
    trained = []
    for overlaps in (False, True):
        torch.manual_seed(0)
        model, optimizer = wrapped(overlap_gathers=overlaps)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("parameters", [True, False])
def test_an_offloaded_training_has_all_parameters(parameters):
    model, optimizer = wrapped(overlap_gathers=True)
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


def test_a_checkpoint_is_loaded_after_a_step(tmp_path):
    model, optimizer = wrapped(overlap_gathers=True)
    for step in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            ballast.save(tmp_path, model, optimizer)
            expected = [parameter.detach().clone() for parameter in model.parameters()]
    ballast.load_checkpoint(tmp_path, model, optimizer)
    assert all(map(torch.equal, expected, model.parameters()))


def test_a_model_is_needed():
    plain = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ballast.Error, match="cannot overlap gathers without a model"):
        ballast.wrap(plain, tuning=ballast.Tuning(overlap_gathers=True))
    assert type(plain) is torch.optim.AdamW
