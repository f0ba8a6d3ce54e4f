"""Tests of interrupts that arrive right after the library has acquired a unit: nothing stays acquired."""

import sys
from contextlib import contextmanager
from typing import Any

import ballast
import pytest
import torch
from ballast.torch.parameters.managed_parameter import ManagedParameter
from ballast.torch.parameters.unit_gather import UnitGather
from python.wrap.support.loops import Loop, Run, Tower, check_equal, mlp

ACQUIRING = [(3, "acquire_parameters"), (3, "acquire_gradients"), (2, "acquire_gradients")]
where_it_acquires = pytest.mark.parametrize(("stage", "acquires"), ACQUIRING)


class Interrupting:
    """A training of the library. An interrupt arrives when a call has returned that acquires a unit."""

    def __init__(self, core: Any, acquires: str):
        self._core = core
        self._acquires = acquires

    def __getattr__(self, name: str) -> Any:
        return self._interrupted if name == self._acquires else getattr(self._core, name)

    def _interrupted(self, unit: int) -> None:
        getattr(self._core, self._acquires)(unit)
        raise KeyboardInterrupt


def loop_at(stage: int, steps: int = 3) -> Loop:
    """Return a training in which the backward pass completes a unit also below stage 3."""
    return Loop(make_model=Tower if stage == 3 else mlp, steps=steps)


def interrupt(stage: int, acquires: str, loop: Loop, model: torch.nn.Module, optimizer: Any) -> None:
    partition = optimizer._ballast.partition_now()
    owners = [partition, *([partition.memory._gather] if stage == 3 else [])]
    loss = loop.loss(model, loop.batch(0)) if acquires == "acquire_gradients" else None
    for owner in owners:
        owner.core = Interrupting(owner.core, acquires)
    with pytest.raises(KeyboardInterrupt):
        loop.loss(model, loop.batch(0)) if loss is None else loss.backward()
    for owner in owners:
        owner.core = owner.core._core


def make(stage: int) -> tuple[torch.nn.Module, Any]:
    model = loop_at(stage).make_model()
    return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)


@where_it_acquires
def test_training_continues_after_an_interrupt(stage, acquires):
    loop = loop_at(stage)
    quiet = loop.run(stage=stage)
    model, optimizer = make(stage)
    losses = []
    for first in range(loop.steps):
        interrupt(stage, acquires, loop, model, optimizer)
        optimizer.zero_grad()
        losses += loop_at(stage, first + 1).train(model, optimizer, first).losses
    with ballast.gather(quiet.model), ballast.gather(model):
        check_equal(Run(model, optimizer, losses), quiet)


@where_it_acquires
def test_close_returns_the_parameters_after_an_interrupt(stage, acquires):
    model, optimizer = make(stage)
    before = [each.detach().clone() for each in model.parameters()]
    interrupt(stage, acquires, loop_at(stage), model, optimizer)
    optimizer.close()
    assert all(map(torch.equal, model.parameters(), before))
    assert all(type(each) is torch.nn.Parameter for each in model.parameters())


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_close_returns_the_parameters_after_a_second_interrupt(monkeypatch):
    """It arrives before the unit of the first one is released."""
    model, optimizer = make(3)
    before = [each.detach().clone() for each in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(UnitGather, "_release", interrupted)
        interrupt(3, "acquire_parameters", loop_at(3), model, optimizer)
    optimizer.close()
    assert all(map(torch.equal, model.parameters(), before))


def test_an_interrupt_while_parameters_are_shown_leaves_none_of_them(monkeypatch):
    """Torch sees a part of a unit then."""
    loop = loop_at(3)
    model, optimizer = make(3)
    before = [each.detach().clone() for each in model.parameters()]
    gather = optimizer._ballast.partition_now().memory._gather
    [last, *_] = gather._unit_managed[gather.member_of(model.blocks[0].up.weight).unit][::-1]

    monkeypatch.setattr(last, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.loss(model, loop.batch(0))
    monkeypatch.undo()
    assert not any(map(gather.is_gathered, gather.members.values()))
    optimizer.close()
    assert all(map(torch.equal, model.parameters(), before))


def hooks_of(model: torch.nn.Module) -> list[Any]:
    return [hook for each in model.modules() for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values())]


def test_an_interrupt_while_parameters_are_taken_leaves_no_hooks(monkeypatch):
    """The hooks of wrap() stay, which begin the training."""
    model, optimizer = make(3)
    before = hooks_of(model)
    monkeypatch.setattr(ManagedParameter, "shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer._ballast.partition_now()
    assert hooks_of(model) == before


CHANGES = (UnitGather.open, UnitGather.close_unit, UnitGather._release, ManagedParameter.gather, ManagedParameter.reshard)


@contextmanager
def interrupt_at(line: int):
    """Raise KeyboardInterrupt before the n-th line of functions that change which unit torch sees."""
    codes, met = {function.__code__ for function in CHANGES}, 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal met
        if frame.f_code not in codes:
            return None
        if event == "line":
            met += 1
            if met == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_training_continues_after_an_interrupt_at_any_line_that_changes_the_unit():
    loop = loop_at(3)
    quiet = loop.run(stage=3)
    model, optimizer = make(3)
    loop.loss(model, loop.batch(0)).backward()
    optimizer.zero_grad()
    line, is_interrupted = 0, True
    while is_interrupted:
        line += 1
        try:
            with interrupt_at(line):
                loop.loss(model, loop.batch(0)).backward()
            is_interrupted = False
        except KeyboardInterrupt:
            pass
        optimizer.zero_grad()
    assert line > 100
    losses = loop.train(model, optimizer, 0).losses
    with ballast.gather(quiet.model), ballast.gather(model):
        check_equal(Run(model, optimizer, losses), quiet)
