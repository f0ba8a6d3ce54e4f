"""Tests of overlap_gathers: each use of a parameter after a step waits until it is updated and gathered."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast import _core
from ballast.errors import FailureError
from ballast.torch.calls.hooks import receiver_of
from ballast.torch.parameters import overlapped_gathers
from ballast.torch.parameters.overlapped_gathers import AwaitedParameter, OverlappedGathers
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, numbered
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks

before_update: list[Callable[[], None]] = []  # called before this rank updates its shards


class HeldSGD(torch.optim.Optimizer):
    """Calls the functions of `before_update`, and then makes a step of SGD."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for call in before_update:
            call()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class Model(torch.nn.Module):
    """Uses the weight of its last module before it calls that module, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.first = torch.nn.utils.weight_norm(torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 6, bias=False)

    def encoded(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.embedding(words, self.head.weight) * self.scale)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(self.encoded(words)))


WORDS = torch.tensor([0, 3, 5])


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def gathered(model: Model) -> list[torch.Tensor]:
    with ballast.gather(model):
        return values(model)


def loaded(model: Model) -> list[torch.Tensor]:
    model.load_state_dict({name: torch.ones_like(each) for name, each in Model().state_dict().items()})
    return []


@torch.no_grad()
def written(model: Model) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.fill_(0.5)
    return []


def assigned(model: Model) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.data = torch.full(parameter.shape, 0.25)
    return []


USES: dict[str, Callable[[Model], list[torch.Tensor]]] = {
    "a call of the model": lambda model: [model(WORDS).detach()],
    "a method of the model": lambda model: [model.encoded(WORDS).detach()],
    "a call of a module": lambda model: [model.first(torch.ones(4)).detach()],
    "a parameter": lambda model: [model.head.weight.norm().detach()],
    "a list of parameters": lambda model: [each.detach() for each in torch._foreach_norm([*model.parameters()])],
    "values of .data": values,
    "NumPy": lambda model: [torch.from_numpy(model.head.weight.data.numpy().copy())],
    "state_dict()": lambda model: [each.clone() for each in model.state_dict().values()],
    "gather()": gathered,
    "a copy": lambda model: values(copy.deepcopy(model.head)),
    "a copy of a parameter": lambda model: [copy.deepcopy(model.head.weight).detach()],
    "a pickle": lambda model: values(pickle.loads(pickle.dumps(model.head))),
    "load_state_dict()": loaded,
    "a write": written,
    "assigned data": assigned,
}


class ReleasingCore:
    """A training of the library that calls a function before each wait."""

    def __init__(self, core: Any, release: Callable[[], None]):
        self._core, self._release = core, release

    def wait_for_parameters(self, unit: int) -> None:
        self._release()
        self._core.wait_for_parameters(unit)

    def finish(self) -> None:
        self._release()
        self._core.finish()


@contextmanager
def holding(rank: int, model: torch.nn.Module) -> Iterator[None]:
    """Hold rank 1's update until rank 0 waits for a parameter, or until the end of the block."""
    gathers = receiver_of(next(model.parameters())).current.memory._gathers
    core, is_held = gathers._core, True

    def release() -> None:
        nonlocal is_held
        if is_held:
            is_held = False
            dist.send(torch.zeros(1), 1)

    if rank == 1:
        before_update.append(lambda: dist.recv(torch.zeros(1), 0))
    else:
        gathers._core = ReleasingCore(core, release)
    try:
        yield
    finally:
        before_update.clear()
        gathers._core = core
        if rank == 0:
            release()


def overlaps_of(rank: int, stage: int, given: bool | None, offload: Any = None) -> list[bool]:
    """Return whether parameters are awaited after a step: of an optimizer that is wrapped with its model, and without it."""
    found = []
    for has_model in (True, False):
        model = Model()
        tuning = ballast.Tuning(elementwise=True, overlap_gathers=given)
        of = model if has_model else None
        optimizer = ballast.wrap(HeldSGD(model.parameters()), of, stage=stage, offload=offload, tuning=tuning)
        backward(model)
        optimizer.step()
        found.append(type(model.scale) is AwaitedParameter)
        optimizer.close()
    return found


def begun_by_hand(**options: Any) -> tuple[Model, Any]:
    """Return a training after its first step."""
    model = Model()
    optimizer = ballast.wrap(HeldSGD(model.parameters()), model, **keywords(elementwise=True, **options))
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: torch.nn.Module) -> None:
    model(WORDS).square().mean().backward()


def used_while_held(rank: int, stage: int) -> dict[str, list[list[torch.Tensor]]]:
    """Return for each use what it returns and the parameters after it and after one more step: without overlapping gathers,
    and with them."""
    return {name: [used(rank, stage, use, overlaps) for overlaps in (False, True)] for name, use in USES.items()}


def used(rank: int, stage: int, use: Callable[[Model], list[torch.Tensor]], overlaps: bool) -> list[torch.Tensor]:
    model, optimizer = begun_by_hand(stage=stage, overlap_gathers=overlaps)
    backward(model)
    if overlaps:
        with holding(rank, model):
            optimizer.step()
            found = use(model)
    else:
        optimizer.step()
        found = use(model)
    optimizer.zero_grad()
    found += gathered(model)
    backward(model)
    optimizer.step()
    optimizer.close()
    return found + values(model)


def scripted_part(rank: int, stage: int) -> list[torch.Tensor]:
    """Return the parameters after two steps of a model with a scripted module, which has no hooks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4))
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model, stage=stage)
    for _ in range(2):
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert type(model[1].weight) is torch.nn.Parameter
    optimizer.close()
    return values(model)


def traced_while_held(rank: int) -> list[list[torch.Tensor]]:
    """Return what a traced model returns after two steps, of which the last one comes late: without and with overlap."""
    return [traced(rank, overlaps) for overlaps in (False, True)]


def traced(rank: int, overlaps: bool) -> list[torch.Tensor]:
    model, optimizer = begun_by_hand(stage=2, overlap_gathers=overlaps)
    called = torch.jit.trace(model.head, torch.ones(4))
    backward(model)
    with holding_all(rank) if overlaps else nullcontext():
        optimizer.step()
        found = [called(torch.ones(4)).detach()]
    optimizer.close()
    return found


@contextmanager
def holding_all(rank: int) -> Iterator[None]:
    """Let rank 1's update come late."""
    if rank == 1:
        before_update.append(lambda: time.sleep(0.3))
    try:
        yield
    finally:
        before_update.clear()


def compiled_while_held(rank: int) -> list[list[torch.Tensor]]:
    """Return what a model returns that was compiled and evaluated before its training, without and with overlapping gathers."""
    return [compiled(rank, overlaps) for overlaps in (False, True)]


def compiled(rank: int, overlaps: bool) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = Model()
    called = torch.compile(model, backend="aot_eager")
    optimizer = ballast.wrap(
        HeldSGD(model.parameters()), model, stage=2, tuning=ballast.Tuning(elementwise=True, overlap_gathers=overlaps)
    )
    with torch.no_grad():
        found = [called(WORDS)]
    for step in range(3):
        backward(called)
        if overlaps and step > 0:
            with holding(rank, model):
                optimizer.step()
                found.append(called(WORDS).detach())
        else:
            optimizer.step()
            found.append(called(WORDS).detach())
        optimizer.zero_grad()
    optimizer.close()
    return found


def closed_after_a_failure(rank: int) -> list[torch.Tensor]:
    """Rank 1's update fails while rank 0 has parameters to gather. Return the parameters of the closed training."""
    model, optimizer = begun_by_hand(stage=2, overlap_gathers=True)
    backward(model)
    if rank == 1:

        def failing() -> None:
            dist.recv(torch.zeros(1), 0)
            raise RuntimeError("planted")

        before_update.append(failing)
        try:
            optimizer.step()
        except Exception:
            before_update.clear()
    else:
        optimizer.step()
        dist.send(torch.zeros(1), 1)
    optimizer.close()
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in (model, model.head))
    return values(model)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Other tests of this process may have compiled code, or scripted modules."""
    monkeypatch.setattr(overlapped_gathers, "has_compiled", lambda: False)
    monkeypatch.setattr(overlapped_gathers, "has_scripted", lambda: False)


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
    for uses in run_ranks(2, used_while_held, stage):
        for name, (expected, found) in uses.items():
            assert len(expected) == len(found)
            assert all(map(torch.equal, expected, found)), name


def test_a_compiled_model_waits_for_held_gathers():
    for expected, found in run_ranks(2, compiled_while_held):
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("stage", [0, 2])
def test_steps_wait_where_a_module_is_scripted(stage):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(2, scripted_part, stage):
        assert all(map(torch.allclose, values(plain), found))


def test_a_traced_model_has_all_of_the_last_update():
    for expected, found in run_ranks(2, traced_while_held):
        assert all(map(torch.equal, expected, found))


def test_a_scripted_module_refuses_to_overlap():
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(4, 4)))
    with pytest.raises(ballast.UsageError, match="cannot overlap gathers: torch.jit(.|\n)*module 0"):
        ballast.wrap(torch.optim.SGD(model.parameters()), model, tuning=ballast.Tuning(overlap_gathers=True))


def test_a_training_that_failed_while_it_gathered_can_be_closed():
    for parameters in run_ranks(2, closed_after_a_failure):
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


def test_steps_wait_once_a_module_is_scripted(monkeypatch):
    model, gathers, core = begun()
    gathers.finish()
    monkeypatch.setattr(overlapped_gathers, "has_scripted", lambda: True)
    core.log.clear()
    gathers.begin()
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
    for overlapped in run_ranks(2, overlaps_of, stage, given):
        assert overlapped == [expected, bool(given)]


def test_updates_of_one_rank_on_a_cpu_need_no_overlap():
    assert overlaps_of(0, 2, None) == [False, False]


def test_updates_of_offloaded_state_overlap_the_next_forward_of_one_rank(tmp_path):
    offload = {"state": f"nvme:{tmp_path}"}
    assert overlaps_of(0, 2, None, offload) == [True, False]
    assert overlaps_of(0, 2, False, offload) == [False, False]


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
