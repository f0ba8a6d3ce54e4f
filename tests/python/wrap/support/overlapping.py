"""Trainings of two ranks in which rank 1 holds its update, so rank 0 uses parameters that are not gathered yet."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ballast
import torch
import torch.distributed as dist
from ballast.torch.calls.hooks import receiver_of
from ballast.torch.parameters.overlapped_gathers import AwaitedParameter
from python.wrap.support.keywords import keywords

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


def overlaps(rank: int, stage: int, given: bool | None) -> list[bool]:
    """Return whether parameters are awaited after a step: of an optimizer that is wrapped with its model, and without it."""
    found = []
    for has_model in (True, False):
        model = Model()
        tuning = ballast.Tuning(elementwise=True, overlap_gathers=given)
        optimizer = ballast.wrap(HeldSGD(model.parameters()), model if has_model else None, stage=stage, tuning=tuning)
        backward(model)
        optimizer.step()
        found.append(type(model.scale) is AwaitedParameter)
        optimizer.close()
    return found


def begun(**options: Any) -> tuple[Model, Any]:
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
    model, optimizer = begun(stage=stage, overlap_gathers=overlaps)
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
    model, optimizer = begun(stage=2, overlap_gathers=True)
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
