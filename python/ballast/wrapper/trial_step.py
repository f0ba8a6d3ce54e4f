"""Find out what an optimizer's own step does, and keeps of each element, by trials on a few elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast.checks import fail
from ballast.errors import Error
from ballast.wrapper.custom_step import CustomStepRunner, Piece
from ballast.wrapper.step_rollback import StepRollback

ELEMENTS = 7  # an unusual number, so that another value seldom has that many
START = 0.5  # the largest element before a trial
GRADIENTS = (0.1, -0.2)  # of each step, the largest element
LION_GRADIENTS, LION_LR = (*GRADIENTS, 0.0001), 0.01  # the last one points against the momentum
REMEDY = 'Keep its state in memory, where it may be anything: offload={"state": "host"}, or none.'


def values_of_each_element(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Make a few steps of this class on a few elements for each parameter group, and return the names of what they keep of each
    element. The optimizer stays as it is.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> values_of_each_element(torch.optim.RMSprop([weight], momentum=0.9), torch.optim.RMSprop)
    ('square_avg', 'momentum_buffer')
    """
    names: list[str] = []
    for state in _states_after_steps(optimizer, kind):
        for name, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == (ELEMENTS,)) or name in names:
                continue
            if value.dtype != torch.float32:
                _refuse(kind, f"its state {name} is of {value.dtype} for parameters of torch.float32")
            names.append(name)
    if len(names) > _core.MAX_OWN_VALUES:
        _refuse(kind, f"it keeps {len(names)} values of each element: {', '.join(names)}")
    return tuple(names)


def makes_steps_of_lion(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this class named Lion makes the steps that the paper describes, with the options of its groups. Variants
    have the same name."""
    kept = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = LION_LR  # a schedule may begin with 0
        _, found = _trial(optimizer, type(optimizer), new_objects=False, gradients=LION_GRADIENTS)
    except Error:
        return False
    finally:
        for group, lr in zip(optimizer.param_groups, kept):
            group["lr"] = lr
    groups = [group for group in optimizer.param_groups if group["params"]]
    return all(torch.allclose(values, _after_lion(group), atol=1e-6) for values, group in zip(found, groups))


def _after_lion(group: Mapping[str, Any]) -> torch.Tensor:
    values, momentum = _values(START), torch.zeros(ELEMENTS, device="cpu")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    for factor in LION_GRADIENTS:
        gradient = _values(-factor if group.get("maximize") else factor)
        values = values * (1 - LION_LR * float(group["weight_decay"])) - LION_LR * momentum.lerp(gradient, 1 - beta1).sign()
        momentum = momentum.lerp(gradient, 1 - beta2)
    return values


def _states_after_steps(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the states after each step. In a training each step gets new objects for the same parameters, so a step
    that remembers objects is refused: it would lose what it knows of them."""
    states, values = _trial(optimizer, kind, new_objects=True)
    _, expected = _trial(optimizer, kind, new_objects=False)
    if not all(torch.equal(one, other) for one, other in zip(values, expected)):
        _refuse(kind, "its step keeps something of a parameter outside of optimizer.state, or draws random numbers")
    return states


def _trial(
    optimizer: torch.optim.Optimizer,
    kind: type[torch.optim.Optimizer],
    *,
    new_objects: bool,
    gradients: Sequence[float] = GRADIENTS,
) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    groups = [group for group in optimizer.param_groups if group["params"]]
    pieces = [Piece(group["params"][0], torch.nn.Parameter(_values(START)), {}) for group in groups]
    rollback, step = StepRollback(optimizer), CustomStepRunner(kind)
    states: list[dict[str, Any]] = []
    try:
        with torch.random.fork_rng(devices=[]):
            for gradient in gradients:
                if new_objects:
                    pieces = [Piece(each.parameter, torch.nn.Parameter(each.masters.detach()), each.state) for each in pieces]
                for piece in pieces:
                    piece.masters.grad = _values(gradient)
                step.run(optimizer, pieces, is_last=True)
                states += [dict(piece.state) for piece in pieces]
    except Exception as error:
        _refuse(kind, f"its step has failed on {ELEMENTS} elements: {type(error).__name__}: {error}")
    finally:
        rollback.undo()
    return states, [piece.masters.detach() for piece in pieces]


def _values(factor: float) -> torch.Tensor:
    return torch.linspace(-factor, factor, ELEMENTS, device="cpu")


def _refuse(kind: type[torch.optim.Optimizer], why: str) -> NoReturn:
    fail(
        "unsupported",
        _core.Problem(
            what=f"the library cannot keep the state of {kind.__module__}.{kind.__qualname__}: {why}",
            needed=f"at most {_core.MAX_OWN_VALUES} values of each element, of torch.float32, which its first two steps make",
            remedy=REMEDY,
        ),
    )
