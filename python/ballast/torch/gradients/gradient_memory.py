"""Gradients in the library's memory: copied there from torch, and read and changed where they are summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ballast import _core
from ballast._torch_compat import copy_each, without_torch_function
from ballast.connecting import Group
from ballast.torch.collectives import numbers_of_all_ranks
from ballast.torch.gpu import wait_for_current_streams
from ballast.torch.gradients.taken_gradients import TakenGradient
from ballast.torch.memory import TORCH_DTYPES, tensor_of
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, views_in


class GradientCopies:
    """Copies a unit's gradients together. Keeps the views of the library's memory, which is the same in each step."""

    def __init__(self, units: Sequence[ParameterUnit], begins: Sequence[list[int]]):
        self._units = units
        self._trained = [unit.trained for unit in units]
        self._begins = begins  # of tensors, by unit
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}  # by unit and address

    def copy(self, unit: int, memory: _core.Memory) -> None:
        """Copy the gradients of a unit that have arrived, and drop torch's copies of them."""
        key, trained = (unit, memory.address), self._trained[unit]
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


Visitor = Callable[[int, torch.Tensor], None]  # gets a member and its gradients, or a part of them

PIECE = 1 << 20  # elements that are computed in fp64 at a time
BITS = 31  # of each of two integers that hold a summand


class GradientShards:
    """Reads and changes the gradients of the backward passes so far, where they are summed over all ranks. All ranks make the
    same calls together."""

    def __init__(self, core: _core.Training, sharing: Group | None, ranks: int, members: Sequence[UnitParameter]):
        self._core, self._sharing, self._ranks = core, sharing, ranks  # of which `sharing` have a shard each
        self._numbers = {(member.unit, member.tensor): number for number, member in enumerate(members)}

    def visit(self, visitor: Visitor) -> None:
        """Show the gradients, which the visitor may change. Norms that follow are those of the changed ones."""

        def show(unit: int, tensor: int, memory: _core.Memory, dtype: _core.DType) -> None:
            values = tensor_of(memory, TORCH_DTYPES[dtype])
            visitor(self._numbers[unit, tensor], values)
            wait_for_current_streams([values])

        with torch.no_grad():
            self._core.visit_gradients(show)

    def scale(self, factors: Mapping[int, float]) -> None:
        """Multiply the gradients of these members."""
        self.visit(lambda member, values: values.mul_(factors[member]) if member in factors else None)

    def clamp(self, bounds: Mapping[int, tuple[float, float]]) -> None:
        """Clamp the averages over the ranks to these bounds, by member."""
        ranks = self._ranks

        def clamp(member: int, values: torch.Tensor) -> None:
            if member in bounds:
                least, most = bounds[member]
                values.clamp_(least * ranks, most * ranks)

        self.visit(clamp)

    def norms(self, order: float) -> list[float]:
        """Return the norm of each member's average over the ranks. Its bits do not depend on how shards are cut: summands are
        integers, in units of a part of the largest one."""
        largest = self._largest()
        if order == math.inf:
            return [each / self._ranks for each in largest]
        sums = [0] * (2 * len(largest))

        def add(member: int, values: torch.Tensor) -> None:
            if not 0.0 < largest[member] < math.inf:
                return
            for piece in values.split(PIECE):
                summands = _power(piece.abs().double() / largest[member], order) * 2.0**BITS
                high = summands.floor()
                sums[2 * member] += int(high.to(torch.int64).sum())
                sums[2 * member + 1] += int(((summands - high) * 2.0**BITS).to(torch.int64).sum())

        self.visit(add)
        sums = sums if self._sharing is None else self._sharing.all_reduce(sums)
        powers = [((high << BITS) + low) / (1 << 2 * BITS) for high, low in zip(sums[::2], sums[1::2])]
        if order == 0.0:
            return powers
        roots = [power ** (1.0 / order) / self._ranks for power in powers]
        return [most * root if math.isfinite(most) else most for most, root in zip(largest, roots)]

    def _largest(self) -> list[float]:
        """Return the largest absolute value of each member's sum over the ranks; NaN if one is NaN."""
        mine = [0.0] * len(self._numbers)

        def look(member: int, values: torch.Tensor) -> None:
            found = float(values.abs().max()) if values.numel() > 0 else 0.0
            mine[member] = found if math.isnan(found) else max(mine[member], found)

        self.visit(look)
        of_ranks = [[each] for each in mine] if self._sharing is None else numbers_of_all_ranks(self._sharing, mine)
        return [math.nan if any(map(math.isnan, each)) else max(each) for each in of_ranks]


def _power(values: torch.Tensor, order: float) -> torch.Tensor:
    """Return powers, with the same bits everywhere for the usual orders."""
    if order in (1.0, 2.0, 3.0):
        return values if order == 1.0 else values * values if order == 2.0 else values * values * values
    return (values != 0).double() if order == 0.0 else values**order
