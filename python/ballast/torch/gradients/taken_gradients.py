"""The gradients of a step that the library has taken: their copies in its memory, the tensors without memory that replace them
in `parameter.grad`, and the answers of these."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from sys import getrefcount
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast._torch_compat import (
    CLAMP_EACH_FROM_ABOVE,
    CLAMP_EACH_FROM_BELOW,
    COPY_AS,
    MULTIPLY_EACH_BY_NUMBER,
    MULTIPLY_EACH_BY_TENSOR,
    NORM_OF_EACH,
    UNSCALE_EACH,
    copy_each,
    is_in_backward,
    make_wrapper_tensor,
    without_torch_function,
)
from ballast.checks import refuse_order, refuse_unsupported
from ballast.ranks import Group
from ballast.torch.calls.hooks import late_hook_of, refuse_late_hook
from ballast.torch.gradients.gradient_sums import FactorReader, GradientFactors, NormTensors, refuse_different
from ballast.torch.parameters.managed_parameter import refuse_cast
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, views_in

aten = torch.ops.aten


class TakenGradient(torch.Tensor):
    """Answers norms, clipping and gradient scalers from the sums over all ranks. Autograd adds gradients of later
    passes to it, which wait in `next`."""

    taker: TakenGradients
    member: int
    fresh: torch.Tensor | None  # the gradient, until its unit is taken
    next: torch.Tensor | None  # the gradient of the pass that begins now
    spent: bool  # a step has used it
    last_norm: float | None  # the norm of a spent gradient, if the step knew it

    @staticmethod
    def of(parameter: torch.Tensor, taker: TakenGradients, member: int) -> TakenGradient:
        made = make_wrapper_tensor(TakenGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        assert isinstance(made, TakenGradient)
        made.taker, made.member = taker, member
        made.fresh, made.next, made.spent, made.last_norm = None, None, False, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TakenGradient({self.taker.name_of(self.member)}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ANSWERS:
            refuse_to_compute(func, args)
        return ANSWERS[func](*args, **(kwargs or {}))

    def _assign_data(self, values: torch.Tensor) -> None:
        if values is self:  # model.to(device) assigns it if the model is there already
            return
        refuse_use("cannot assign other values to a gradient: it is partitioned over ranks", self)

    data = property(torch.Tensor.data.__get__, _assign_data)

    def spend(self, norm: float | None) -> None:
        """Note that a step has used the gradient, whose norm was this."""
        self.spent, self.last_norm = True, norm

    def receive(self, gradient: torch.Tensor) -> None:
        if self.spent:
            self.taker.take_again(self)
        self.taker.require_unscaled(self.member)
        self.next = gradient if self.next is None else self.next + gradient


def refuse_to_compute(func: Any, args: Sequence[Any]) -> NoReturn:
    """Refuse to compute with values that are not on this rank."""
    flat = (each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    taken = next(each for each in flat if isinstance(each, TakenGradient))
    if func is aten.add.Tensor and is_in_backward() and torch.is_grad_enabled():
        refuse_unsupported(  # autograd makes the sum of two passes with a graph, as a new tensor
            "cannot add gradients in a backward pass with create_graph=True: those of an earlier pass are partitioned over "
            "ranks",
            where=f"parameter {taken.taker.name_of(taken.member)}",
            needed="at most one such pass in a step, before the other passes",
            remedy="For a penalty on gradients call torch.autograd.grad(loss, inputs, create_graph=True), which adds nothing "
            "to parameter.grad.",
        )
    refuse_use(f"cannot compute {func} of a gradient: it is partitioned over ranks", taken)


def refuse_use(what: str, gradient: TakenGradient) -> NoReturn:
    name, hook = gradient.taker.name_of(gradient.member), gradient.taker.late_hook_of(gradient.member)
    if hook and is_in_backward():
        refuse_late_hook(f"{what} when the hook {hook} is called", name)
    refuse_unsupported(
        what,
        where=f"parameter {name}",
        needed="norms, clipping, or scaling",
        remedy="Look at gradients, and change them, in a hook of the parameter (register_hook()), before they are taken. "
        "If this is DistributedDataParallel: leave it out, or name the model, wrap(optimizer, model).",
    )


def refuse_as_updated(what: str, needed: str) -> NoReturn:
    """Refuse what comes too late with update_in_backward."""
    refuse_order(
        f"{what}: parameters have been updated in the backward pass",
        needed=needed,
        remedy="Leave update_in_backward out of ballast.Tuning().",
    )


def refuse_norm(what: str, where: str = "") -> NoReturn:
    refuse_order(
        f"cannot compute {what}: a step has used the values, or they were discarded",
        where=where,
        needed="norms before step()",
        remedy='optimizer.metrics()["grad_norm"] is the norm of all gradients in the last step, before clipping.',
    )


def _norm_order(order: Any) -> float:
    return 2.0 if order is None else float(order)


def _vector_norm(gradient: TakenGradient, order: Any = 2, *rest: Any, **more: Any) -> torch.Tensor:
    if any(each for each in rest):
        refuse_to_compute("a norm along a dimension", [gradient])
    return _foreach_norm([gradient], order, **more)[0]


def _foreach_norm(gradients: Sequence[torch.Tensor], order: Any = 2, **more: Any) -> list[torch.Tensor]:
    if not _norm_order(order) >= 0.0:
        refuse_to_compute(f"a norm of order {order}", gradients)
    return [_norm(gradient, _norm_order(order), more.get("dtype")) for gradient in gradients]


def _norm(gradient: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if not isinstance(gradient, TakenGradient):
        return torch.linalg.vector_norm(gradient, order, dtype=dtype)
    dtype = dtype or torch.float32
    if not gradient.spent:
        return gradient.taker.norm_tensor(gradient.member, gradient.device, dtype, order)
    if gradient.last_norm is None or order != 2.0:
        refuse_norm("the norm of a gradient", f"parameter {gradient.taker.name_of(gradient.member)}")
    return torch.tensor(gradient.last_norm, dtype=dtype, device=gradient.device)


def _add(gradient: TakenGradient, other: torch.Tensor, *, alpha: float = 1) -> TakenGradient:
    """Receive the next pass from autograd. A user's sum would come too late: the gradient is taken."""
    if not is_in_backward() or isinstance(other, TakenGradient) or alpha != 1:
        refuse_to_compute(aten.add_.Tensor, [gradient])
    gradient.receive(other)
    return gradient


def _scale(gradient: TakenGradient, factor: Any, *, divides: bool = False) -> TakenGradient:
    """Scale the gradient in the step that it belongs to. A spent one has nothing but a norm, which is forgotten."""
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        refuse_to_compute("elementwise products", [gradient])
    if not gradient.spent:
        gradient.taker.scale(gradient.member, factor, divides=divides)
    elif float(factor) != 1.0:
        gradient.last_norm = None
    return gradient


def _foreach_mul(gradients: Sequence[torch.Tensor], factors: Any) -> None:
    each = factors if isinstance(factors, (list, tuple)) else [factors] * len(gradients)
    for gradient, factor in zip(gradients, each):
        gradient.mul_(factor)


def _clamp(gradient: TakenGradient, least: Any = None, most: Any = None, **named: Any) -> TakenGradient:
    least, most = named.get("min", least), named.get("max", most)
    _clamp_each([gradient], -math.inf if least is None else least, math.inf if most is None else most)
    return gradient


def _clamp_each(gradients: Sequence[torch.Tensor], least: Any, most: Any) -> None:
    """Clamp gradients where they are summed. A spent one has nothing but a norm, which is forgotten."""
    if isinstance(least, torch.Tensor) or isinstance(most, torch.Tensor):
        refuse_to_compute("bounds that are tensors", gradients)
    members: dict[TakenGradients, list[int]] = {}
    for gradient in gradients:
        if not isinstance(gradient, TakenGradient):
            gradient.clamp_(least, most)
        elif gradient.spent:
            gradient.last_norm = None
        else:
            members.setdefault(gradient.taker, []).append(gradient.member)
    for taker, taken_members in members.items():
        taker.clamp(taken_members, float(least), float(most))


def _zero(gradient: TakenGradient) -> TakenGradient:
    gradient.taker.drop(gradient.member)
    gradient.fresh = gradient.next = None
    return gradient


def _cast(gradient: TakenGradient, **_: Any) -> NoReturn:
    """Undo the cast of parameters, and refuse it: torch casts each gradient after its parameter."""
    gradient.taker.undo_casts()
    refuse_cast(
        "cannot cast or move a gradient: training has begun, and the gradient is partitioned over ranks",
        gradient.taker.name_of(gradient.member),
        to_look="in a hook of the parameter, before the gradient is taken",
    )


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    taken = [gradient for gradient in gradients if isinstance(gradient, TakenGradient)]
    for gradient in taken:
        if gradient.spent:
            refuse_norm("whether gradients are finite", f"parameter {gradient.taker.name_of(gradient.member)}")
    are_finite = [taker.all_finite() for taker in dict.fromkeys(gradient.taker for gradient in taken)]
    if not all(are_finite):
        found_inf.fill_(1.0)
    for gradient in taken:
        gradient.taker.scale(gradient.member, inverse_scale, unscales=True)
    if others := [gradient for gradient in gradients if not isinstance(gradient, TakenGradient)]:
        UNSCALE_EACH(others, found_inf, inverse_scale)


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: _add,
    **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar), _scale),
    **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar), partial(_scale, divides=True)),
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: lambda gradient, most: _clamp(gradient, None, most),
    CLAMP_EACH_FROM_BELOW: lambda gradients, least: _clamp_each(gradients, least, math.inf),
    CLAMP_EACH_FROM_ABOVE: lambda gradients, most: _clamp_each(gradients, -math.inf, most),
    aten.zero_.default: _zero,
    COPY_AS: _cast,
    aten.detach.default: lambda gradient: gradient,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _vector_norm,
    NORM_OF_EACH: _foreach_norm,
    MULTIPLY_EACH_BY_NUMBER: _foreach_mul,
    MULTIPLY_EACH_BY_TENSOR: _foreach_mul,
    UNSCALE_EACH: _unscale,
}


Norms = list[float]  # one norm for each member
Bounds = dict[int, tuple[float, float]]  # bounds by member


class GradientCopies:
    """Copies a unit's gradients together. Keeps the views of the library's memory, which is the same in each step."""

    def __init__(self, units: Sequence[ParameterUnit]):
        self._trained = [unit.trained for unit in units]
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}  # views by unit and address

    def copy(self, unit: int, memory: _core.Memory) -> None:
        """Copy the gradients of a unit that have arrived, and drop torch's copies of them."""
        key, trained = (unit, memory.address), self._trained[unit]
        if key not in self._views:
            self._views[key] = views_in(memory, trained)
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


class TakenGradients:
    """Replaces gradients by objects without memory, and answers what torch asks of these."""

    def __init__(
        self,
        group: Group,
        members: Sequence[UnitParameter],
        read_norms: Callable[[float], Norms],
        clamp: Callable[[Bounds], None],
        undo_casts: Callable[[], None],
    ):
        self._group = group
        self._members = members
        self._read_norms = weakref.WeakMethod(read_norms)  # a method of the partition, which owns this object
        self._clamp = weakref.WeakMethod(clamp)
        self.undo_casts = undo_casts
        self._made: list[TakenGradient | None] = [None] * len(members)  # objects of earlier steps
        self.zeros: set[int] = set()  # members with a gradient of zeros, from zero_grad(set_to_none=False)
        self.are_parts = False  # other ranks have gradients of other parts of the same tensors
        self.may_scale = True  # false after parameters have been updated with them in the backward pass
        self._factors, self._factor_reader = GradientFactors(group, members), FactorReader()
        self._norms: dict[float, Norms] = {}  # norms by order
        self._norm_tensors = NormTensors()
        self.begin_step()

    def begin_step(self) -> None:
        self.taken: set[int] = set()  # members
        self._absent: set[int] = set()  # members in `taken` that have none, next to others of their unit
        self._ranks_use_others = False  # some rank uses other members than this rank
        self._added: int | None = None  # a member whose gradient was added to one that the last step has used
        if not self._factors.are_one:
            self._factors, self._factor_reader = GradientFactors(self._group, self._members), FactorReader()
        self.forget_norms()
        self._before_clipping = 1.0  # the ratio of the norm before clipping to the norm after it, of gradients scaled apart
        self._rank_with_others: int | None = None  # a rank that has gradients of other parameters than rank 0

    def forget_norms(self) -> None:
        """Forget the norms: other gradients follow, or values have changed."""
        if self._norms:
            self._norms, self._norm_tensors = {}, NormTensors()
        self._are_summed = False  # torch adds up norms of the gradients that this rank has
        self.norm_is_known = False  # the caller knows the norm: its later factors clip

    def take(self, member: int, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Keep a gradient until its unit is taken, where autograd does not add the next pass to it."""
        if self.zeros:
            if gradient is None and member in self.zeros:
                return
            self.zeros.discard(member)
        if type(gradient) is not TakenGradient:
            with without_torch_function():
                parameter.grad = self._in_place_of(member, parameter, gradient)
            self.taken.add(member)
            if gradient is None:
                self._absent.add(member)
        elif gradient.next is not None:
            if self._absent:
                self._absent.discard(member)
            held = gradient.fresh
            gradient.fresh, gradient.next = gradient.next if held is None else held + gradient.next, None

    def _in_place_of(self, member: int, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> TakenGradient:
        """Return the object of an earlier step, or a new one if a caller has kept that or the parameter was cast."""
        made = self._made[member]
        if made is None or getrefcount(made) > _references_of_an_item() or made.dtype != parameter.dtype:
            made = self._made[member] = TakenGradient.of(parameter, self, member)
        made.fresh, made.next, made.spent = gradient, None, False
        return made

    def take_again(self, gradient: TakenGradient) -> None:
        """Begin to take gradients that autograd adds to one that a step has used. Another loss may cause them, as that of a
        generator causes gradients of its discriminator, and they are cleared before the next step of this optimizer."""
        self._added = gradient.member
        if not self.may_scale:
            self.require_not_added("cannot update parameters in the backward pass")
        gradient.fresh, gradient.next, gradient.spent = None, None, False
        self.taken.add(gradient.member)

    def require_not_added(self, what: str) -> None:
        """Refuse to use a sum of new gradients with those that the last step has used: their values are gone."""
        if self._added is not None:
            refuse_order(
                f"{what}: gradients were added to those of the last step, which have not been cleared",
                where=f"parameter {self.name_of(self._added)}",
                needed="optimizer.zero_grad() between the step and the backward pass of the next one",
            )

    def require_unscaled(self, member: int) -> None:
        """Refuse another pass over a gradient that was scaled: the factor applies to all passes of the step, and torch's to
        those that have come."""
        if self._factors.are_one:
            return
        factor = self._factors.total_of(member)
        if factor != 1.0:
            hook = self.late_hook_of(member)
            in_hook = f", perhaps in the hook {hook}, which is registered after ballast.wrap()" if hook else ""
            refuse_order(
                f"cannot add gradients: those of earlier passes were scaled by {factor}{in_hook}",
                where=f"parameter {self.name_of(member)}",
                needed="scaling and clipping after the last backward pass of a step",
                remedy="Call step() or zero_grad() first. To weigh the passes of a step, scale their losses.",
            )

    def not_taken(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients were assigned, and not computed by backward()."""
        parameters = [each.parameter for number, each in enumerate(self._members) if number not in self.taken]
        with without_torch_function():
            return [each for each in parameters if each.grad is not None and not isinstance(each.grad, TakenGradient)]

    def are_cleared(self) -> bool:
        """Return whether the gradients were cleared through the model, to judge by one of them."""
        with without_torch_function():
            return any(not isinstance(self._members[number].parameter.grad, TakenGradient) for number in islice(self.taken, 1))

    def cleared(self) -> list[int]:
        """Return the members whose gradients were cleared through the model."""
        with without_torch_function():
            return [number for number in self.taken if not isinstance(self._members[number].parameter.grad, TakenGradient)]

    def require_complete(self) -> None:
        """Refuse a sum that a hook has added to a gradient after it was taken."""
        for gradient in self._taken_objects():
            if gradient.next is not None:
                refuse_use("cannot make a step: a hook added to a gradient after it was taken", gradient)

    def spend(self) -> None:
        """Note that a step has used the gradients. Their norms stay known where they are."""
        for gradient in self._taken_objects():
            gradient.spend(self.norm_of(gradient.member) if 2.0 in self._norms else None)

    def _taken_objects(self) -> list[TakenGradient]:
        """Return the objects in the places of gradients that were taken, unless a caller has replaced them."""
        with without_torch_function():
            gradients = [self._members[number].parameter.grad for number in self.taken]
            return [each for each in gradients if isinstance(each, TakenGradient)]

    def are_spent(self) -> bool:
        """Return whether gradients that a step has used were not cleared."""
        with without_torch_function():
            gradients = [each.parameter.grad for each in self._members]
        return any(isinstance(each, TakenGradient) and each.spent for each in gradients)

    def require_cleared(self) -> None:
        """Refuse a step without new gradients while those of the last one have not been cleared: torch would use them again."""
        if self.are_spent():
            refuse_order(
                "cannot make a step: the last one has used the gradients",
                needed="a backward pass before each step()",
                remedy="Call optimizer.zero_grad() after each step: one without gradients then does nothing.",
            )

    def end(self) -> None:
        """Remove the objects: the training ends."""
        with without_torch_function():
            for member in self._members:
                if isinstance(member.parameter.grad, TakenGradient):
                    member.parameter.grad = None
        self._made = []  # they refer to this object

    def factor(self, scale: Callable[[Mapping[int, float]], None]) -> float:
        """Return the one factor of all gradients, or NaN if one is not finite on any rank, after `scale` has multiplied those
        that have different ones. All ranks call it together."""
        if self._factors.are_one and self._group.size == 1:
            return 1.0

        def scale_apart(factors: Mapping[int, float]) -> None:
            norms = self._norms_of_order(2.0)
            before, after = self._factors.norms(norms, factors)
            if after > 0.0:
                self._before_clipping *= before / after
            scale(factors)
            self.forget_norms()

        return self._factors.agreed(self.taken, scale_apart)

    def before_clipping(self, factor: float) -> float:
        """Return the ratio of the norm before clipping to the norm after it. All ranks call it together."""
        return self._before_clipping * (1.0 if factor == 1.0 else self._factors.before_clipping(self.taken, factor))

    def clip_all(self, factor: float) -> None:
        self._factors.clip_all(factor)
        self._norm_tensors = NormTensors()

    # --- What torch asks ---

    def late_hook_of(self, member: int) -> str:
        return late_hook_of(self._members[member].parameter)

    def name_of(self, member: int) -> str:
        return self._members[member].name

    def norm_of(self, member: int, order: float = 2.0) -> float:
        factor = abs(self._factors.total_of(member))
        return self._norms_of_order(order)[member] * (factor if order > 0.0 else float(factor != 0.0))

    def _norms_of_order(self, order: float) -> Norms:
        """Return the norms of all gradients before any factor."""
        if order not in self._norms:
            read_norms = self._read_norms()
            if read_norms is None:
                refuse_order("cannot compute the norm of a gradient: its training has ended", needed="the same before close()")
            self._norms[order] = read_norms(order)
        return self._norms[order]

    def clamp(self, members: Sequence[int], least: float, most: float) -> None:
        if not self.may_scale:
            refuse_as_updated("cannot clamp gradients", "hooks of parameters (register_hook()) that clamp them")
        clamp = self._clamp()
        if clamp is None:
            refuse_order("cannot clamp a gradient: its training has ended", needed="the same before close()")
        factors = {member: self._factors.total_of(member) for member in members}
        clamp({member: (least / factor, most / factor) for member, factor in factors.items() if factor > 0.0})
        self.forget_norms()

    def all_finite(self) -> bool:
        """Return whether all gradients of all ranks are finite, so that all ranks return the same."""
        return all(map(math.isfinite, self._norms_of_all()))

    def _norms_of_all(self, order: float = 2.0) -> list[float]:
        return [self.norm_of(member, order) for member in range(len(self._members))]

    def norm_tensor(self, member: int, device: torch.device, dtype: torch.dtype, order: float) -> torch.Tensor:
        self.norm_is_known = True
        return self._norm_tensors.take(member, (device, dtype, order), partial(self._norms_to_sum, order))

    def _norms_to_sum(self, order: float) -> list[float]:
        if self.are_parts:
            refuse_different(
                "cannot compute norms of gradients: they are those of parts of DTensors, and other ranks have other parts",
                where="mesh=",
                needed="the norm of the full model",
            )
        self._are_summed = True
        norms = self._norms_of_all(order)
        self.require_same_on_all_ranks("compute norms of gradients")
        return norms

    # --- Gradients of different parameters on different ranks ---

    def digests(self) -> list[int]:
        """Return words for compare_ranks() of all ranks."""
        taken, used = self._digest(self.taken), self._used()
        return [taken, int(self._are_summed), taken if used is self.taken else self._digest(used)]

    def _digest(self, members: Container[int]) -> int:
        return zlib.crc32(bytes(map(members.__contains__, range(len(self._members)))))

    def _used(self) -> set[int]:
        """Return the members that have a gradient on this rank."""
        return self.taken - self._absent | self.zeros if self._absent or self.zeros else self.taken

    def used(self, members: Sequence[int]) -> list[int]:
        """Return for each member whether it has a gradient on this rank."""
        return [*map(int, map(self._used().__contains__, members))]

    def unused(self) -> list[int]:
        """Return the members that have no gradient on any rank. All ranks call it together, after compare_ranks()."""
        used = self.used(range(len(self._members)))
        used = self._group.all_reduce(used) if self._ranks_use_others else used
        return [] if all(used) else [member for member, ranks in enumerate(used) if ranks == 0]

    def compare_ranks(self, taken: Sequence[int], are_summed: Sequence[int], used: Sequence[int]) -> None:
        """Learn whether the ranks have gradients of the same parameters. If not, refuse, on all ranks, norms that torch adds
        up: each rank would miss those of the gradients that it does not have, and clip by another factor or not at all."""
        self._ranks_use_others = len({*used}) > 1
        self._rank_with_others = next((rank for rank, each in enumerate(taken) if each != taken[0]), None)
        if any(are_summed):
            self.require_same_on_all_ranks("compute norms of gradients")

    def require_same_on_all_ranks(self, what: str) -> None:
        if self._rank_with_others is not None:
            self._are_summed = False  # the caller may try optimizer.clip_grad_norm_()
            refuse_different(
                f"cannot {what}: ranks have gradients of different parameters",
                where=f"rank {self._rank_with_others}, which has others than rank 0",
                needed="gradients of the same parameters on all ranks",
            )

    def scale(self, member: int, factor: float | torch.Tensor, *, divides: bool = False, unscales: bool = False) -> None:
        value = self._factor_reader.read(factor)
        if not self.may_scale and value != 1.0:
            refuse_as_updated("cannot scale gradients", "a loss, or hooks of parameters (register_hook()), that scale them")
        if divides:
            value = math.inf if value == 0.0 else 1.0 / value
        self._factors.scale(member, value, clips=self.norm_is_known and not unscales)
        self._norm_tensors.forget(member)

    def drop(self, member: int) -> None:
        """Make a gradient zero, which counts as one in later steps."""
        self._members[member].parameter.grad = None
        self.zeros.add(member)


@cache
def _references_of_an_item() -> int:
    """Return what getrefcount() says of an object in a list and in a variable. Versions of Python differ."""
    items = [object()]
    item = items[0]
    return getrefcount(item)
