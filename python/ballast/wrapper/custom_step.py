"""Run an optimizer's own step on pieces of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ballast.checks import refuse
from ballast.wrapper.step_rollback import StepRollback, saved_options
from ballast.wrapper.units import Member

HIDDEN = ("grad_scale", "found_inf")  # from a gradient scaler: the library has done its work already


@dataclass
class Piece:
    """Consecutive elements of a parameter, which this rank updates together: their masters with the gradient, and their
    state, which the step changes."""

    parameter: torch.nn.Parameter
    masters: torch.nn.Parameter
    state: dict[str, Any]


class CustomStepRunner:
    """The step of the optimizer's class. The library may call it several times in a training step, each time with other
    pieces: then each call begins with the options and attributes that the optimizer had before the first one. A group keeps
    the options of the last call in which it had pieces, and the optimizer the attributes of the last call."""

    def __init__(self, kind: type[torch.optim.Optimizer]):
        step: Any = kind.step
        self._step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._rollback: StepRollback | None = None
        self._options: dict[int, Callable[[], Any]] = {}  # by group: after the last call in which it had pieces

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
            self._end()  # no other call follows
            raise
        for piece in pieces:
            piece.masters.grad = None
        if self._rollback is not None:
            self._keep_options(optimizer, pieces)
        if is_last:
            for restore in self._options.values():
                restore()
            self._end()

    def _keep_options(self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> None:
        updated = {id(piece.parameter) for piece in pieces}
        for number, group in enumerate(optimizer.param_groups):
            if any(id(parameter) in updated for parameter in group["params"]):
                self._options[number] = saved_options(group)

    def _end(self) -> None:
        self._rollback, self._options = None, {}


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
        require_state_of_parameters(own, pieces)
    finally:
        optimizer.state = shown
        for group, params in zip(optimizer.param_groups, full):
            group["params"] = params
        for piece in pieces:
            piece.state = own.get(piece.masters, {})
        vars(optimizer).update(hidden)


def require_state_of_parameters(state: dict[Any, Any], pieces: Sequence[Piece]) -> None:
    """Refuse state that belongs to no parameter: it would be lost."""
    known = {id(piece.masters) for piece in pieces}
    for key in state:
        if id(key) not in known:
            refuse(
                f"the optimizer's step keeps state of no parameter: state[{key!r:.60}]",
                needed="state of each parameter; or an option of a parameter group, or an attribute, for anything else",
            )


def group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))


def moved(name: str, value: Any, group: Mapping[str, Any], like: torch.Tensor) -> Any:
    """Return a value of the state where the step needs it: on the device of the parameter, as torch has it. A count of steps
    stays on the host, unless a kernel counts the steps."""
    counted_on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
    if not isinstance(value, torch.Tensor) or counted_on_host:
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
