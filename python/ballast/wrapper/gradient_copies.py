"""Gradients on their way from torch into the library's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ballast import _core
from ballast._torch_compat import copy_each, without_torch_function
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
        with without_torch_function():  # the parameters may be without their values
            for member, view in zip(trained, self._views[key]):
                taken = member.parameter.grad
                if type(taken) is not TakenGradient or taken.fresh is None:
                    continue
                fresh, taken.fresh = taken.fresh, None
                into.append(view)
                gradients.append(_like(view, fresh))
            if into:
                copy_each(into, gradients)

    def forget_views(self) -> None:
        """Forget the views: the library's memory is about to be freed."""
        self._views = {}


def _like(view: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as copy_each() copies it into this view."""
    if gradient.requires_grad:  # it was made with create_graph=True
        gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient if gradient.shape == view.shape else gradient.reshape(view.shape)
