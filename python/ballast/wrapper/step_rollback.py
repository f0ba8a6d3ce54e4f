"""Undo what an optimizer's own step has changed outside its parameters and its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

# The attributes of every optimizer, which are no part of a step. Those of the class itself may be.
OF_EVERY_OPTIMIZER = frozenset({*vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=1.0)), "_ballast"})

Restore = Callable[[], Any]


class StepRollback:
    """The options of parameter groups and the attributes of an optimizer, as they are now. Tensors and containers keep their
    identity when they return to their values. Other objects that a step changes stay changed."""

    def __init__(self, optimizer: torch.optim.Optimizer):
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
        return _saved_items(value)
    if isinstance(value, dict):
        return _saved_dict(value)
    if isinstance(value, set):
        return _saved_set(value)
    if type(value) is tuple:
        items = [_saved(item) for item in value]
        return lambda: tuple(restore() for restore in items)
    return lambda: value


def _saved_tensor(tensor: torch.Tensor) -> Restore:
    values = tensor.detach().clone()

    def restore() -> torch.Tensor:
        tensor.detach().copy_(values)
        return tensor

    return restore


def _saved_items(value: list[Any] | deque[Any]) -> Restore:
    items = [_saved(item) for item in value]

    def restore() -> Any:
        value.clear()
        value.extend(restore_item() for restore_item in items)
        return value

    return restore


def _saved_dict(value: dict[Any, Any]) -> Restore:
    items = {key: _saved(item) for key, item in value.items()}

    def restore() -> Any:
        value.clear()
        value.update({key: restore_item() for key, restore_item in items.items()})
        return value

    return restore


def _saved_set(value: set[Any]) -> Restore:
    members = set(value)

    def restore() -> Any:
        value.clear()
        value.update(members)
        return value

    return restore
