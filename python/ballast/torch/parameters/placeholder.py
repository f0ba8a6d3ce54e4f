"""The classes that a parameter has while its values are elsewhere: it has the shape, and asks its owner when it is used.

Views of opaque parameters do the same. A cast of the model is refused: the optimizer keeps values in the format that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from inspect import signature
from typing import Any, NoReturn, Protocol

import torch

from ballast import _core
from ballast._torch_compat import is_alias, make_wrapper_tensor, without_torch_function
from ballast.checks import fail, refuse
from ballast.torch.gpu import GPU

CASTS = {"to", "type", "half", "bfloat16", "float", "double", "cpu", GPU}  # methods of tensors


def refuse_cast(what: str, name: str, *, code: str = "unsupported", to_look: str = "", available: str = "") -> NoReturn:
    """Raise the error. `to_look` says how to get a copy in another format."""
    needed = "a model that is cast and moved before ballast.wrap(), or before its first step"
    problem = _core.Problem(
        what=what,
        where=f"parameter {name}",
        needed=f"{needed}; to look at a copy: {to_look}" if to_look else needed,
        available=available,
        remedy="To cast a model that was trained: optimizer.close(), cast the model, and wrap a new optimizer.",
    )
    fail(code, problem)


def require_no_cast(use: str, name: str, *, why: str) -> None:
    """Refuse the function `use` of a parameter whose values are elsewhere, if it is a cast or a move."""
    if use in CASTS:
        what = f"cannot cast or move a parameter with {use}(): {why}"
        refuse_cast(what, name, code="out_of_order", to_look="with ballast.gather(model): ...")


def require_same_kind(name: str, *, kept: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse a parameter that cannot be copied back."""
    if (kept.dtype, kept.device) != (found.dtype, found.device):
        what = f"cannot continue: the model was cast or moved from {kept.dtype} on {kept.device} after training began"
        refuse_cast(what, name, available=f"{found.dtype} on {found.device}")
    if kept.shape != found.shape:
        problem = _core.Problem(
            what="cannot continue: a parameter changed its shape after training began",
            where=f"parameter {name}",
            needed=f"shape {tuple(kept.shape)}, or a new parameter in the model and in param_groups",
            available=f"shape {tuple(found.shape)}",
        )
        fail("unsupported", problem)


# Functions of a parameter that do not need its values.
_HARMLESS = {
    "__get__",
    "__set__",
    "__hash__",
    "__len__",
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "element_size",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "_has_compatible_shallow_copy_type",
}

# Functions that need the graph, and no values of the parameters in it.
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)

# Properties that are the values. Those are needed to read them, and written where one is set. All others are harmless.
_VALUES = {"T", "H", "mT", "mH", "real", "imag", "data"}

_VIEW = object()  # in the place of a view of memory that will have other values

ATTRIBUTE = "ballast_managed"  # of a torch parameter: its ManagedParameter
ATTRIBUTE_OF_AWAITED = "ballast_wait"  # of an AwaitedParameter


class UsedThroughOwner(Protocol):
    """The part of an owner that brings values while torch uses them."""

    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> AbstractContextManager[None]: ...


class Owned(Protocol):
    """The part of a ManagedParameter that names the owner of its values, and the class of the parameter in torch's hands."""

    @property
    def owner(self) -> UsedThroughOwner | None: ...
    @property
    def kind(self) -> type[torch.Tensor]: ...
    @property
    def is_opaque(self) -> bool: ...


def _bring_values(
    _: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return call_with_values(func, args, kwargs or {})


class Placeholder(torch.nn.Parameter):
    """A parameter without its values. A change of its class makes a parameter one, and an ordinary one again."""

    ballast_managed: Owned

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter of {tuple(self.shape)}, {self.dtype}, gathered where it is used: with ballast.gather(model): ..."

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    __torch_function__: Any = classmethod(_bring_values)


class GatheredOpaque(torch.nn.Parameter):
    """An opaque parameter while its values are gathered. Its libraries keep views of it for backward, on their own: those are
    gathered again where they are used."""

    ballast_managed: Owned

    __torch_function__: Any = classmethod(_bring_values)


class OpaqueView(torch.Tensor):
    """A view of an opaque parameter, without memory."""

    ballast_parameter: torch.nn.Parameter
    ballast_begin: int  # its first element, counted from the parameter's

    @staticmethod
    def of(parameter: torch.nn.Parameter, view: torch.Tensor, begin: int) -> OpaqueView:
        made = make_wrapper_tensor(OpaqueView, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device)
        assert isinstance(made, OpaqueView)
        made.ballast_parameter, made.ballast_begin = parameter, begin
        return made

    __torch_function__: Any = classmethod(_bring_values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        refuse(
            f"cannot call {func}: a view of a packed parameter is used where its values are not gathered",
            needed="the view, or the parameter, as an argument of a function of torch",
        )


_gathered_opaque: dict[str, type[GatheredOpaque]] = {}  # by name of the class in torch's hands


def gathered_opaque(kind: type[torch.Tensor]) -> type[GatheredOpaque]:
    """Return the class of a gathered opaque parameter that is of this class in torch's hands."""
    if kind is torch.nn.Parameter:
        return GatheredOpaque
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _gathered_opaque or not issubclass(_gathered_opaque[name], kind):
        _gathered_opaque[name] = type(kind.__name__, (GatheredOpaque, kind), {"__module__": kind.__module__})
    return _gathered_opaque[name]


def call_with_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch while the owners bring the values that it uses."""
    if needs_no_values(func):
        with without_torch_function():
            return func(*args, **kwargs)
    if _leaves_as_it_is(func, args, kwargs):
        return None if _name_of(func) == "__set__" else args[0]
    if func in _DIFFERENTIATE:
        arguments = signature(func).bind(*args, **kwargs).arguments
        if any(isinstance(each, Placeholder) for each in arguments["inputs"] or ()):
            return _differentiate(func, arguments)
    flat = _flat(args, kwargs.values())
    views = [each for each in flat if type(each) is OpaqueView]
    used = [(each, owner) for each in flat if (owner := _owner_of(each)) is not None]
    used += [(each.ballast_parameter, owner) for each in views if (owner := _owner_of(each.ballast_parameter)) is not None]

    def call(*, copied: bool) -> Any:
        with ExitStack() as gathered:
            for owner in dict.fromkeys(owner for _, owner in used):
                mine = [each for each, its_owner in used if its_owner is owner]
                gathered.enter_context(owner.using(mine, _name_of(func), again=bool(views), copied=copied))
            with without_torch_function():
                with_memory = _with_memory(args) if views else args
                named = {key: _with_memory([each])[0] for key, each in kwargs.items()} if views else kwargs
                result = func(*with_memory, **named)
                opaque = [each for each, _ in used if getattr(each, ATTRIBUTE).is_opaque]
                if opaque:
                    return _without_memory(result, opaque)
                if not copied and any(_is_view(each, used) for each in _flat([result])):
                    return _VIEW
                return result

    result = call(copied=False)
    return call(copied=True) if result is _VIEW else result


def _is_view(value: Any, used: Sequence[tuple[Any, UsedThroughOwner]]) -> bool:
    """Return whether a result is a view of one of these parameters, and not the parameter itself."""
    if not isinstance(value, torch.Tensor) or any(value is each for each, _ in used):
        return False
    return any(is_alias(value, each) for each, _ in used)


def _leaves_as_it_is(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function changes nothing of a parameter: a cast to its own format, a move to its own device, or its own
    values in place of its values. `model.to(device)` makes one after the other."""
    name = _name_of(func)
    if name not in CASTS and name != "__set__":
        return False  # functions of torch.nn.init are called with keywords only
    parameter = args[0]
    if name == "__set__":
        return parameter is args[1]
    if not isinstance(parameter, Placeholder) or kind_of(parameter) is not torch.nn.Parameter:
        return False
    with without_torch_function():
        probe = nothing_like(parameter, parameter.device)
        return func(probe, *args[1:], **kwargs) is probe


def _differentiate(func: Any, arguments: dict[str, Any]) -> Any:
    """Call torch.autograd.grad() or backward() with edges of the graph in place of parameters, whose values they do not need.
    Their classes stay active: what runs in the backward pass may need values."""
    inputs, makes_graph = arguments["inputs"], arguments.get("create_graph", False)
    fills = arguments.get("materialize_grads", False)  # torch cannot, for edges
    changed = {"materialize_grads": False, "allow_unused": True} if fills else {}
    edges = [_edge_of(each) if isinstance(each, Placeholder) else each for each in inputs]
    found = func(**{**arguments, **changed, "inputs": edges})
    if not fills:
        return found

    def zeros_like(each: torch.Tensor) -> torch.Tensor:
        return torch.zeros(each.shape, dtype=each.dtype, device=each.device, requires_grad=makes_graph)

    return tuple(zeros_like(each) if gradient is None else gradient for gradient, each in zip(found, inputs))


def _edge_of(parameter: torch.Tensor) -> Any:
    with without_torch_function():
        return torch.autograd.graph.get_gradient_edge(parameter)


def _with_memory(values: Sequence[Any]) -> list[Any]:
    """Return the arguments with memory for each view. Its parameter is gathered."""
    found: list[Any] = []
    for each in values:
        if type(each) is OpaqueView:
            parameter = each.ballast_parameter.detach()
            flat = parameter.as_strided((parameter.numel(),), (1,)).view(torch.uint8).view(each.dtype)
            each = flat.as_strided(each.size(), each.stride(), flat.storage_offset() + each.ballast_begin)
        elif isinstance(each, (list, tuple)):
            each = type(each)(_with_memory(each)) if type(each) in (list, tuple) else each
        found.append(each)
    return found


def _without_memory(result: Any, opaque: Sequence[torch.nn.Parameter]) -> Any:
    """Return the result of a function, with an OpaqueView for each view of these parameters."""
    if type(result) in (list, tuple):
        return type(result)(_without_memory(each, opaque) for each in result)
    if not isinstance(result, torch.Tensor) or any(result is parameter for parameter in opaque):
        return result
    for parameter in opaque:
        begin = result.data_ptr() - parameter.data_ptr()
        if result.numel() > 0 and 0 <= begin < parameter.nbytes:
            return OpaqueView.of(parameter, result, begin // result.element_size())
    return result


def _owner_of(value: Any) -> UsedThroughOwner | None:
    managed: Owned | None = getattr(value, ATTRIBUTE, None)
    return None if managed is None else managed.owner


def kind_of(parameter: torch.Tensor) -> type[torch.Tensor]:
    """Return the class of a parameter in torch's hands, wherever its values are."""
    managed: Owned | None = getattr(parameter, ATTRIBUTE, None)
    if managed is not None:
        return managed.kind
    return torch.nn.Parameter if hasattr(parameter, ATTRIBUTE_OF_AWAITED) or type(parameter) is Placeholder else type(parameter)


def plain(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter that torch has as a plain tensor: the class of another library may change what
    `.to()` does."""
    if kind_of(parameter) in (torch.nn.Parameter, torch.Tensor) and not isinstance(parameter, GatheredOpaque):
        return parameter.detach()
    with without_torch_function():
        return parameter.detach()


def slice_on_host(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return elements of a tensor that torch has. Their bytes are their values, as those of a lazy conjugate are not."""
    return plain(tensor).reshape(-1)[first : first + count].to("cpu").resolve_conj().resolve_neg().contiguous()


def needs_no_values(func: Any) -> bool:
    """Return whether a function of torch uses a parameter without its values."""
    name = _name_of(func)
    return name in _HARMLESS and not (name in ("__get__", "__set__") and func.__self__.__name__ in _VALUES)


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _flat(*values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        for each in value:
            flat += each if isinstance(each, (list, tuple)) else [each]
    return flat


def nothing_like(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with the parameter's shape, and memory for one element."""
    return nothing_of(parameter.dtype, device).expand(parameter.shape)


def nothing_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for one element, which shows where it is computed with."""
    has_nan = dtype.is_floating_point and dtype.itemsize > 1
    return torch.full((), float("nan") if has_nan else 0, dtype=dtype, device=device)
