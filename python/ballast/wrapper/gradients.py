"""The tensor that replaces a taken gradient in `parameter.grad`: it has the shape, and no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

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
    is_in_backward,
    make_wrapper_tensor,
)
from ballast.checks import fail, refuse_order
from ballast.wrapper.casting import refuse_cast
from ballast.wrapper.hooks import refuse_late_hook

aten = torch.ops.aten


class Taker(Protocol):
    """Has taken gradients, and answers questions about them."""

    def name_of(self, member: int) -> str: ...
    def late_hook_of(self, member: int) -> str: ...
    def norm_tensor(self, member: int, device: torch.device, dtype: torch.dtype, order: float) -> torch.Tensor: ...
    def clamp(self, members: Sequence[int], least: float, most: float) -> None: ...
    def scale(
        self, member: int, factor: float | torch.Tensor, *, divides: bool = False, unscales: bool = False
    ) -> None: ...
    def all_finite(self) -> bool: ...
    def require_unscaled(self, member: int) -> None: ...
    def take_again(self, gradient: TakenGradient) -> None: ...
    def drop(self, member: int) -> None: ...
    def undo_casts(self) -> None: ...


class TakenGradient(torch.Tensor):
    """Answers norms, clipping and gradient scalers from the sums over all ranks. Autograd adds gradients of later
    passes to it, which wait in `next`."""

    taker: Taker
    member: int
    fresh: torch.Tensor | None  # the gradient, until its unit is taken
    next: torch.Tensor | None  # the gradient of the pass that begins now
    spent: bool  # a step has used it
    last_norm: float | None  # of a spent gradient, if the step knew it

    @staticmethod
    def __new__(
        cls, parameter: torch.Tensor, taker: Taker, member: int, fresh: torch.Tensor | None = None
    ) -> TakenGradient:
        made: Any = make_wrapper_tensor(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        gradient: TakenGradient = made
        gradient.taker = taker
        gradient.member = member
        gradient.fresh = fresh
        gradient.next = None
        gradient.spent, gradient.last_norm = False, None
        return gradient

    def __init__(
        self, parameter: torch.Tensor, taker: Taker, member: int, fresh: torch.Tensor | None = None
    ):
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TakenGradient({self.taker.name_of(self.member)}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in ANSWERS:
            refuse_to_compute(func, args)
        return ANSWERS[func](*args, **(kwargs or {}))

    def _assign_data(self, values: torch.Tensor) -> None:
        if values is self:  # as in model.to(device), where the model is there
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
        refuse_graph(taken)
    refuse_use(f"cannot compute {func} of a gradient: it is partitioned over ranks", taken)


def refuse_graph(gradient: TakenGradient) -> NoReturn:
    """Refuse the sum of two passes that autograd makes with a graph, as a new tensor."""
    fail(
        "unsupported",
        _core.Problem(
            what="cannot add gradients in a backward pass with create_graph=True: those of an earlier pass are partitioned "
            "over ranks",
            where=f"parameter {gradient.taker.name_of(gradient.member)}",
            needed="at most one such pass in a step, before the other passes",
            remedy="For a penalty on gradients call torch.autograd.grad(loss, inputs, create_graph=True), which adds nothing "
            "to parameter.grad.",
        ),
    )


def refuse_use(what: str, gradient: TakenGradient) -> NoReturn:
    name, hook = gradient.taker.name_of(gradient.member), gradient.taker.late_hook_of(gradient.member)
    if hook and is_in_backward():
        refuse_late_hook(f"{what} when the hook {hook} is called", name)
    fail(
        "unsupported",
        _core.Problem(
            what=what,
            where=f"parameter {name}",
            needed="norms, clipping, or scaling",
            remedy="Look at gradients, and change them, in a hook of the parameter (register_hook()), before they are taken. "
            "If this is DistributedDataParallel: leave it out, or name the model, wrap(optimizer, model).",
        ),
    )


def refuse_as_updated(what: str, needed: str) -> NoReturn:
    """Refuse what comes too late with update_in_backward."""
    refuse_order(
        f"{what}: parameters have been updated in the backward pass",
        needed=needed,
        remedy="Leave update_in_backward out of ballast.wrap().",
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


def _mul(gradient: TakenGradient, factor: Any) -> TakenGradient:
    _scale(gradient, factor, divides=False)
    return gradient


def _div(gradient: TakenGradient, divisor: Any) -> TakenGradient:
    _scale(gradient, divisor, divides=True)
    return gradient


def _scale(gradient: TakenGradient, factor: Any, *, divides: bool) -> None:
    """Scale the gradient in the step that it belongs to. A spent one has nothing but a norm, which is forgotten."""
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        refuse_to_compute("elementwise products", [gradient])
    if not gradient.spent:
        gradient.taker.scale(gradient.member, factor, divides=divides)
    elif float(factor) != 1.0:
        gradient.last_norm = None


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
    members: dict[Taker, list[int]] = {}
    for gradient in gradients:
        if not isinstance(gradient, TakenGradient):
            gradient.clamp_(least, most)
        elif gradient.spent:
            gradient.last_norm = None
        else:
            members.setdefault(gradient.taker, []).append(gradient.member)
    for taker, of_taker in members.items():
        taker.clamp(of_taker, float(least), float(most))


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
    of_takers = [taker.all_finite() for taker in dict.fromkeys(gradient.taker for gradient in taken)]
    if not all(of_takers):
        found_inf.fill_(1.0)
    for gradient in taken:
        gradient.taker.scale(gradient.member, inverse_scale, unscales=True)
    if others := [gradient for gradient in gradients if not isinstance(gradient, TakenGradient)]:
        UNSCALE_EACH(others, found_inf, inverse_scale)


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: _add,
    aten.mul_.Tensor: _mul,
    aten.mul_.Scalar: _mul,
    aten.div_.Tensor: _div,
    aten.div_.Scalar: _div,
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
