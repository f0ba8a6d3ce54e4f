"""Find out what an optimizer's own step keeps of each element, by a trial on a few elements."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ballast import _core
from ballast.checks import fail
from ballast.wrapper.own_step import OwnStep, Piece
from ballast.wrapper.step_rollback import StepRollback

ELEMENTS = 7  # an unusual number, so that another value seldom has that many
REMEDY = 'Keep its state in memory, where it may be anything: offload={"state": "host"}, or none.'


def values_of_each_element(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Make two steps on a few elements for each parameter group, and return the names of what they keep of each element.
    The optimizer stays as it is.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> values_of_each_element(torch.optim.RMSprop([weight], momentum=0.9))
    ('square_avg', 'momentum_buffer')
    """
    names: list[str] = []
    for state in _states_of_two_steps(optimizer):
        for name, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == (ELEMENTS,)) or name in names:
                continue
            if value.dtype != torch.float32:
                _refuse(optimizer, f"its state {name} is of {value.dtype} for parameters of torch.float32")
            names.append(name)
    if len(names) > _core.MAX_OWN_VALUES:
        _refuse(optimizer, f"it keeps {len(names)} values of each element: {', '.join(names)}")
    return tuple(names)


def _states_of_two_steps(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [group for group in optimizer.param_groups if group["params"]]
    pieces = [Piece(group["params"][0], torch.nn.Parameter(_values(0.5)), {}) for group in groups]
    rollback, step = StepRollback(optimizer), OwnStep(type(optimizer))
    states: list[dict[str, Any]] = []
    try:
        for gradient in (0.1, -0.2):
            for piece in pieces:
                piece.masters.grad = _values(gradient)
            step.run(optimizer, pieces, is_last=True)
            states += [dict(piece.state) for piece in pieces]
    except Exception as error:
        _refuse(optimizer, f"its step has failed on {ELEMENTS} elements: {type(error).__name__}: {error}")
    finally:
        rollback.undo()
    return states


def _values(factor: float) -> torch.Tensor:
    return torch.linspace(-factor, factor, ELEMENTS, device="cpu")


def _refuse(optimizer: torch.optim.Optimizer, why: str) -> NoReturn:
    kind = type(optimizer)
    fail(
        "unsupported",
        _core.Problem(
            what=f"the library cannot keep the state of {kind.__module__}.{kind.__qualname__}: {why}",
            needed=f"at most {_core.MAX_OWN_VALUES} values of each element, of torch.float32, which its first two steps make",
            remedy=REMEDY,
        ),
    )
