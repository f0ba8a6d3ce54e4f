"""What a parameter is while its numbers are elsewhere: it has the shape, and gathers itself when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ballast._torch_compat import without_torch_function

# What can be asked of a parameter without its numbers.
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

# Properties that have to do with numbers. All others are harmless.
_NUMBERS = {"T", "H", "mT", "mH", "real", "imag", "data"}


class Ungathered(torch.nn.Parameter):
    """Made of a parameter by changing its class; and back."""

    ballast_window: Any

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter of {tuple(self.shape)}, {self.dtype}, gathered where it is used: with ballast.gather(model): ..."

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_harmless(func):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        used = [each for each in _flat(args, (kwargs or {}).values()) if hasattr(each, "ballast_window")]
        with ExitStack() as gathered:
            for window in dict.fromkeys(each.ballast_window for each in used):
                mine = [each for each in used if each.ballast_window is window]
                gathered.enter_context(window.gathering(mine, _name_of(func)))
            with without_torch_function():
                return func(*args, **(kwargs or {}))


def _is_harmless(func: Any) -> bool:
    name = _name_of(func)
    return name in _HARMLESS and not (name == "__get__" and func.__self__.__name__ in _NUMBERS)


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _flat(*values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        for each in value:
            flat += each if isinstance(each, (list, tuple)) else [each]
    return flat


def nothing_like(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """With the shape, and one number's memory."""
    return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)
