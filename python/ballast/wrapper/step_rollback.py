"""Undo what an optimizer's own step has changed outside its parameters and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The attributes of every optimizer, which are no part of a step. Those of the class itself may be.
OF_EVERY_OPTIMIZER = frozenset({*vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=1.0)), "_ballast"})


class StepRollback:
    """The options of parameter groups and the attributes of an optimizer, as they are now. Objects keep their identity:
    tensors, lists, dictionaries and sets return to their values."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._groups = _saved(optimizer.param_groups)
        self._attributes = {name: _saved(vars(optimizer)[name]) for name in self._names()}

    def _names(self) -> list[str]:
        return [name for name in vars(self._optimizer) if name not in OF_EVERY_OPTIMIZER]

    def undo(self) -> None:
        self._groups()
        attributes = vars(self._optimizer)
        for name in self._names():
            if name not in self._attributes:
                del attributes[name]
        attributes.update({name: value() for name, value in self._attributes.items()})


def _saved(value: Any) -> Callable[[], Any]:
    """Return a function that restores the value and returns it."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return _saved_tensor(value)
    if isinstance(value, list):
        items = [_saved(item) for item in value]

        def restore_list() -> Any:
            value[:] = [item() for item in items]
            return value

        return restore_list
    if isinstance(value, dict):
        by_key = {key: _saved(item) for key, item in value.items()}

        def restore_dict() -> Any:
            value.clear()
            value.update({key: item() for key, item in by_key.items()})
            return value

        return restore_dict
    if isinstance(value, set):
        members = set(value)

        def restore_set() -> Any:
            value.clear()
            value.update(members)
            return value

        return restore_set
    return lambda: value


def _saved_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    values = tensor.detach().clone()

    def restore() -> torch.Tensor:
        tensor.detach().copy_(values)
        return tensor

    return restore
