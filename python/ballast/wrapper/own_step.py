"""Run an optimizer's own step on pieces of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ballast.wrapper.gpu import wait_for_current_streams
from ballast.wrapper.step_rollback import StepRollback
from ballast.wrapper.units import Member

HIDDEN = ("grad_scale", "found_inf")  # from a gradient scaler: the library has done its work already


@dataclass
class Piece:
    """Consecutive elements of a parameter, which this rank updates together: their masters with the gradient, and their
    state, which the step changes."""

    parameter: torch.nn.Parameter
    masters: torch.nn.Parameter
    state: dict[str, Any]


class OwnStep:
    """The step of the optimizer's class. The library may call it several times in a training step, each time with other
    pieces: then each call begins with the options and attributes that the optimizer had before the first one."""

    def __init__(self, kind: type[torch.optim.Optimizer]):
        step: Any = kind.step
        self._step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._rollback: StepRollback | None = None

    def run(self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], *, is_last: bool) -> None:
        """Update pieces. `is_last` is true in the last call of a training step."""
        if self._rollback is not None:
            self._rollback.undo()
        elif not is_last:
            self._rollback = StepRollback(optimizer)
        try:
            with on_pieces(optimizer, pieces):
                self._step(optimizer)
        except BaseException:
            is_last = True  # no other call follows
            raise
        finally:
            if is_last:
                self._rollback = None
        for piece in pieces:
            piece.masters.grad = None
        wait_for_current_streams([piece.masters for piece in pieces])  # the library continues in streams of its own


def shape_of(member: Member, count: int) -> torch.Size:
    """Return the shape of a piece of this many elements: that of the parameter if it is all of it."""
    shape = member.parameter.shape
    return shape if count == shape.numel() else torch.Size([count])


@contextmanager
def on_pieces(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> Iterator[None]:
    """Replace the optimizer's parameters and state by pieces inside the block, for its own step. The step may change
    everything else."""
    full = [group["params"] for group in optimizer.param_groups]
    hidden = {name: vars(optimizer).pop(name) for name in HIDDEN if name in vars(optimizer)}
    shown = optimizer.state
    own: defaultdict[torch.Tensor, Any] = defaultdict(dict, {piece.masters: piece.state for piece in pieces if piece.state})
    by_parameter: defaultdict[int, list[torch.nn.Parameter]] = defaultdict(list)
    for piece in pieces:
        by_parameter[id(piece.parameter)].append(piece.masters)
    try:
        optimizer.state = own
        for group, params in zip(optimizer.param_groups, full):
            group["params"] = [masters for parameter in params for masters in by_parameter.get(id(parameter), ())]
        yield
    finally:
        optimizer.state = shown
        for group, params in zip(optimizer.param_groups, full):
            group["params"] = params
        for piece in pieces:
            piece.state = own.get(piece.masters, {})
        vars(optimizer).update(hidden)
