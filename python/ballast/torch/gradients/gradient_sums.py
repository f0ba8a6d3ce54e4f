"""Gradients where the library sums them: their norms, the factors by which torch scales or clips them, and changes of them in
place."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

import torch

from ballast import _core
from ballast.checks import refuse_unsupported
from ballast.ranks import Group, least_and_most, numbers_of_all_ranks
from ballast.torch.gpu import tensor_on, wait_for_current_streams
from ballast.torch.memory import TORCH_DTYPES, tensor_of
from ballast.torch.parameters.units import UnitParameter

Kind = tuple[torch.device, torch.dtype, float]  # the last one is the order


class NormTensors:
    """The norms of all gradients as tensors. One copy brings all of them to the device, where torch then asks for them one
    by one. Each tensor is handed out once, because the caller may write to it."""

    def __init__(self) -> None:
        self._ready: dict[Kind, dict[int, torch.Tensor]] = {}

    def take(self, member: int, kind: Kind, norms_of_all: Callable[[], list[float]]) -> torch.Tensor:
        ready = self._ready.setdefault(kind, {})
        if member not in ready:
            device, dtype, _ = kind
            ready.update(enumerate(tensor_on(device, norms_of_all(), dtype).unbind()))
        return ready.pop(member)

    def forget(self, member: int) -> None:
        """Forget the norm of a gradient that is scaled."""
        for ready in self._ready.values():
            ready.pop(member, None)


class FactorReader:
    """Reads a factor once, also if torch multiplies one gradient after the other by the same tensor."""

    def __init__(self) -> None:
        self._last: weakref.ref[torch.Tensor] | None = None
        self._version = 0  # the last tensor's version when it was read
        self._value = 1.0

    def read(self, factor: float | torch.Tensor) -> float:
        if not isinstance(factor, torch.Tensor) or factor.is_inference():  # torch counts no writes to such a tensor
            return float(factor)
        is_known = self._last is not None and self._last() is factor
        if not is_known or self._version != factor._version:
            self._last, self._version, self._value = weakref.ref(factor), factor._version, float(factor)
        return self._value


LACKING = -1.0  # replaces the factor of a gradient that a rank does not have
LEAST = 1e-290  # The library divides by the factor. Its product with gradients, in fp32, is that with 0.


class GradientFactors:
    """The factors of one step. The library multiplies all gradients by one factor, others are scaled where they are summed."""

    def __init__(self, group: Group, members: Sequence[UnitParameter]):
        self._group = group
        self._members = members
        self._by_member: dict[int, float] = {}
        self._scaling: dict[int, float] = {}  # factors by member, without those that clip
        self._common_factor = 1.0  # clips gradients, also those that only other ranks have
        self.are_one = True  # no gradient was scaled or clipped

    def clip_all(self, factor: float) -> None:
        self._common_factor *= _possible(factor, "all parameters")
        self.are_one = False

    def scale(self, member: int, factor: float, *, clips: bool) -> None:
        self.are_one = False
        self._by_member[member] = self.of(member) * _possible(factor, f"parameter {self._members[member].name}")
        if not clips:
            self._scaling[member] = self._scaling.get(member, 1.0) * factor

    def of(self, member: int) -> float:
        """Return the factor of one gradient, without that of all."""
        return self._by_member.get(member, 1.0)

    def total_of(self, member: int) -> float:
        return self._common_factor * self.of(member)

    def agreed(self, taken: Collection[int], scale: Callable[[Mapping[int, float]], None]) -> float:
        """Return the one factor of all gradients, or NaN if one is not finite on any rank. If some have other factors than
        others, `scale` multiplies each by its own first. `taken` has the members whose gradients this rank has. All ranks call
        it together."""
        mine = {self.of(member) for member in taken}
        factors = least_and_most(self._group, mine)
        if not all(map(math.isfinite, factors)):
            return math.nan  # the caller may have clipped by the norm of other gradients too, such as another optimizer's
        if len(factors) > 1:
            scale(self._member_factors(taken, factors))
            self._by_member, self._scaling, factors = {}, {}, []
        return max(LEAST, self._common_factor * (factors[0] if factors else 1.0))

    def before_clipping(self, taken: Collection[int], agreed: float) -> float:
        """Return the ratio of the norm before clipping to the norm after it. `agreed` is the finite factor of all gradients,
        and not 1. All ranks call it together."""
        scaling = max(least_and_most(self._group, {self._scaling.get(member, 1.0) for member in taken}), default=1.0)
        return 1.0 if scaling == agreed else scaling / agreed

    def norms(self, norms: Sequence[float], factors: Mapping[int, float]) -> tuple[float, float]:
        """Return the norm of all gradients before clipping, and with these factors, from the norms before any factor."""
        before = math.hypot(*(norms[member] * self._scaling.get(member, 1.0) for member in factors))
        return before, math.hypot(*(norms[member] * factor for member, factor in factors.items()))

    def _member_factors(self, taken: Collection[int], factors: Sequence[float]) -> dict[int, float]:
        """Return the factor of each member whose gradient the ranks have. Refuse factors that are not the same on all ranks."""
        mine = [self.of(member) if member in taken else LACKING for member in range(len(self._members))]
        by_rank = numbers_of_all_ranks(self._group, mine)
        if differing := [number for number, each in enumerate(by_rank) if len({*each}) > 1]:
            refuse_different(
                "cannot make a step: ranks have scaled or clipped gradients by different factors",
                where=f"parameter {self._members[differing[0]].name}, among others",
                needed="the same factor of a parameter's gradient on all ranks, which have gradients of the same parameters",
                available=", ".join(map(str, factors)),
            )
        return {number: each[0] for number, each in enumerate(by_rank) if each[0] != LACKING}


def _possible(factor: float, where: str) -> float:
    """Return the factor. It may be NaN, from the norm of gradients that are not finite."""
    if factor < 0.0 or factor == math.inf:
        refuse_unsupported(
            f"cannot scale a gradient by {factor}",
            where=where,
            needed="a finite factor that is not negative",
            remedy="To go up the gradient, negate the loss, or give the optimizer maximize=True.",
        )
    return factor


def refuse_different(what: str, *, where: str, needed: str, available: str = "") -> NoReturn:
    """Refuse to clip or scale gradients of which ranks would use different factors."""
    remedy = "Use optimizer.clip_grad_norm_(max_norm), which counts all ranks' gradients, or max_grad_norm= of ballast.wrap()."
    refuse_unsupported(what, where=where, needed=needed, available=available, remedy=remedy)


Visitor = Callable[[int, torch.Tensor], None]  # gets a member and its gradients, or a part of them

PIECE = 1 << 20  # elements that are computed in fp64 at a time
BITS = 31  # bits of each of two integers that hold a summand


class GradientShards:
    """Reads and changes the gradients of the backward passes so far, where they are summed over all ranks. All ranks make the
    same calls together."""

    def __init__(self, core: _core.Training, sharing: Group | None, ranks: int, members: Sequence[UnitParameter]):
        self._core, self._sharing, self._ranks = core, sharing, ranks  # the ranks of `sharing` have a shard each
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
        by_rank = [[each] for each in mine] if self._sharing is None else numbers_of_all_ranks(self._sharing, mine)
        return [math.nan if any(map(math.isnan, each)) else max(each) for each in by_rank]


def _power(values: torch.Tensor, order: float) -> torch.Tensor:
    if order in (1.0, 2.0, 3.0):
        return values if order == 1.0 else values * values if order == 2.0 else values * values * values
    return (values != 0).double() if order == 0.0 else values**order
