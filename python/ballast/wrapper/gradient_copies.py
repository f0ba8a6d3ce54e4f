"""Gradients on their way from torch into the library's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ballast import _core
from ballast._torch_compat import copy_each
from ballast.wrapper.gradients import TakenGradient
from ballast.wrapper.memory import views_in
from ballast.wrapper.units import UnitOfMembers


class GradientCopies:
    """Copies a unit's gradients together. Keeps the views of the library's memory, which is the same in each step."""

    def __init__(self, units: Sequence[UnitOfMembers], begins: Sequence[list[int]]):
        self._units = units
        self._begins = begins  # of tensors, by unit
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}  # by unit and address

    def copy(self, unit: int, memory: _core.Memory) -> None:
        """Copy the gradients of a unit that have arrived, and drop torch's copies of them."""
        key, trained = (unit, memory.address), self._units[unit].trained
        if key not in self._views:
            self._views[key] = views_in(memory, self._units[unit], self._begins[unit], trained)
        into, gradients = [], []
        for member, view in zip(trained, self._views[key]):
            taken = member.parameter.grad
            if not isinstance(taken, TakenGradient) or taken.fresh is None:
                continue
            fresh, taken.fresh = taken.fresh.detach(), None
            into.append(view)
            gradients.append((fresh.to_dense() if fresh.is_sparse else fresh).reshape(member.parameter.shape))
        if into:
            copy_each(into, gradients)

    def forget_views(self) -> None:
        """Forget the views: the library's memory is about to be freed."""
        self._views = {}
