"""The class that a parameter has while its values are elsewhere: it has the shape, and asks its owner when it is
used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from ballast._torch_compat import without_torch_function

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
}

# Properties that need the values. All others are harmless.
_NEED_VALUES = {"T", "H", "mT", "mH", "real", "imag", "data"}

ATTRIBUTE = "ballast_managed"  # of a torch parameter: its ManagedParameter. PendingParameter has another one.


class UsedThroughOwner(Protocol):
    """The part of an owner that brings values while torch uses them."""

    def using(self, parameters: Sequence[torch.nn.Parameter], operation: str) -> AbstractContextManager[None]: ...


class Owned(Protocol):
    """The part of a ManagedParameter that names the owner of its values."""

    @property
    def owner(self) -> UsedThroughOwner | None: ...


class Ungathered(torch.nn.Parameter):
    """A parameter without its values. A change of its class makes a parameter one, and an ordinary one again."""

    ballast_managed: Owned

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter of {tuple(self.shape)}, {self.dtype}, gathered where it is used: with ballast.gather(model): ..."

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if needs_no_values(func):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        used = [(each, owner) for each in _flat(args, (kwargs or {}).values()) if (owner := _owner_of(each)) is not None]
        with ExitStack() as gathered:
            for owner in dict.fromkeys(owner for _, owner in used):
                mine = [each for each, its_owner in used if its_owner is owner]
                gathered.enter_context(owner.using(mine, _name_of(func)))
            with without_torch_function():
                return func(*args, **(kwargs or {}))


def _owner_of(value: Any) -> UsedThroughOwner | None:
    managed: Owned | None = getattr(value, ATTRIBUTE, None)
    return None if managed is None else managed.owner


def needs_no_values(func: Any) -> bool:
    """Return whether a function of torch uses a parameter without its values."""
    name = _name_of(func)
    return name in _HARMLESS and not (name == "__get__" and func.__self__.__name__ in _NEED_VALUES)


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
    return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)
