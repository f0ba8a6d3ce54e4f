"""Run an optimizer's own step on pieces of its parameters, undo what it changes outside of them, and try it on a few elements
to find out what it does."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ballast import _core
from ballast.checks import refuse, refuse_unsupported
from ballast.errors import Error
from ballast.torch.parameters.units import UnitParameter

# The attributes of every optimizer, which are no part of a step. Those of the class itself may be.
OF_EVERY_OPTIMIZER = frozenset({*vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=1.0)), "_ballast"})

Restore = Callable[[], Any]


class StepRollback:
    """The options of parameter groups and the attributes of an optimizer, as they are now. Tensors and containers keep their
    identity when they return to their values. Other objects that a step changes stay changed."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._groups = [saved_options(group) for group in optimizer.param_groups]
        self._attributes = {name: _saved(vars(optimizer)[name]) for name in self._names()}

    def _names(self) -> list[str]:
        return [name for name in vars(self._optimizer) if name not in OF_EVERY_OPTIMIZER]

    def undo(self) -> None:
        for restore in self._groups:
            restore()
        attributes = vars(self._optimizer)
        for name in self._names():
            if name not in self._attributes:
                del attributes[name]
        attributes.update({name: restore() for name, restore in self._attributes.items()})


def saved_options(group: dict[str, Any]) -> Restore:
    """Return a function that restores all of a parameter group but its parameters."""
    options = {name: _saved(value) for name, value in group.items() if name != "params"}

    def restore() -> None:
        for name in [name for name in group if name != "params" and name not in options]:
            del group[name]
        group.update({name: restore_value() for name, restore_value in options.items()})

    return restore


def _saved(value: Any) -> Restore:
    """Return a function that restores the value and returns it."""
    if isinstance(value, torch.Tensor):
        return (lambda: value) if value.requires_grad else _saved_tensor(value)
    if isinstance(value, (list, deque)):
        items = [_saved(item) for item in value]
        return _refilled(value, lambda: value.extend(restore() for restore in items))
    if isinstance(value, dict):
        entries = {key: _saved(item) for key, item in value.items()}
        return _refilled(value, lambda: value.update({key: restore() for key, restore in entries.items()}))
    if isinstance(value, set):
        members = set(value)
        return _refilled(value, lambda: value.update(members))
    if type(value) is tuple:
        parts = [_saved(item) for item in value]
        return lambda: tuple(restore() for restore in parts)
    return lambda: value


def _saved_tensor(tensor: torch.Tensor) -> Restore:
    values = tensor.detach().clone()

    def restore() -> torch.Tensor:
        tensor.detach().copy_(values)
        return tensor

    return restore


def _refilled(container: Any, fill: Callable[[], None]) -> Restore:
    """Return a function that empties a container, fills it again and returns it."""

    def restore() -> Any:
        container.clear()
        fill()
        return container

    return restore


HIDDEN = ("grad_scale", "found_inf")  # a gradient scaler sets these: the library has done its work already


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

    def __init__(self, kind: type[Optimizer]):
        step: Any = kind.step
        self._step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._rollback: StepRollback | None = None
        self._options: dict[int, Callable[[], Any]] = {}  # options by group, after the last call in which it had pieces

    def run(self, optimizer: Optimizer, pieces: Sequence[Piece], *, is_last: bool) -> None:
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
        updated = {id(piece.parameter) for piece in pieces}
        for number, group in enumerate(optimizer.param_groups if self._rollback is not None else ()):
            if any(id(parameter) in updated for parameter in group["params"]):
                self._options[number] = saved_options(group)
        if is_last:
            for restore in self._options.values():
                restore()
            self._end()

    def _end(self) -> None:
        self._rollback, self._options = None, {}


def shape_of(member: UnitParameter, count: int) -> torch.Size:
    """Return the shape of a piece of this many elements: that of the parameter if it is all of it."""
    shape = member.parameter.shape
    return shape if count == shape.numel() else torch.Size([count])


@contextmanager
def on_pieces(optimizer: Optimizer, pieces: Sequence[Piece]) -> Iterator[None]:
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


def group_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))


def moved(name: str, value: Any, group: Mapping[str, Any], like: torch.Tensor) -> Any:
    """Return a value of the state where the step needs it: on the device of the parameter, as torch has it. A count of steps
    stays on the host, unless a kernel counts the steps."""
    counted_on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
    if not isinstance(value, torch.Tensor) or counted_on_host:
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)


ELEMENTS = 7  # an unusual number, so that another value seldom has that many
START = 0.5  # the largest element before a trial
GRADIENTS = (0.1, -0.2)  # the largest element in each step
LION_GRADIENTS, LION_LR = (*GRADIENTS, 0.0001), 0.01  # the last one points against the momentum
REMEDY = 'Keep its state in memory, where it may be anything: offload={"state": "host"}, or none.'


def values_of_each_element(optimizer: Optimizer, kind: type[Optimizer]) -> tuple[str, ...]:
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
    if len(names) > _core.MAX_CUSTOM_VALUES:
        _refuse(kind, f"it keeps {len(names)} values of each element: {', '.join(names)}")
    return tuple(names)


def makes_steps_of_lion(optimizer: Optimizer) -> bool:
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


def _states_after_steps(optimizer: Optimizer, kind: type[Optimizer]) -> list[dict[str, Any]]:
    """Return the states after each step. In a training each step gets new objects for the same parameters, so a step
    that remembers objects is refused: it would lose what it knows of them."""
    states, values = _trial(optimizer, kind, new_objects=True)
    _, expected = _trial(optimizer, kind, new_objects=False)
    if not all(torch.equal(one, other) for one, other in zip(values, expected)):
        _refuse(kind, "its step keeps something of a parameter outside of optimizer.state, or draws random numbers")
    return states


def _trial(
    optimizer: Optimizer,
    kind: type[Optimizer],
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


def _refuse(kind: type[Optimizer], why: str) -> NoReturn:
    refuse_unsupported(
        f"the library cannot keep the state of {kind.__module__}.{kind.__qualname__}: {why}",
        needed=f"at most {_core.MAX_CUSTOM_VALUES} values of each element, of torch.float32, which its first two steps make",
        remedy=REMEDY,
    )
