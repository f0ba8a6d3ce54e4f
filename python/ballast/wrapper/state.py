"""The optimizer's state as torch knows it: read when it is looked at, wherever it is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ballast import _core
from ballast.checks import fail


class LazyState(torch.Tensor):
    """A moment, or the count of steps. Every use reads it, so it costs no memory, and is as of now."""

    read_now: Callable[[], torch.Tensor]
    place: str

    @staticmethod
    def __new__(cls, shape: Sequence[int], name: str, read: Callable[[], torch.Tensor]) -> LazyState:
        moment: LazyState = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)
        moment.read_now = read
        moment.place = name
        return moment

    def __init__(self, shape: Sequence[int], name: str, read: Callable[[], torch.Tensor]):
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyState({self.place}, {self.read_now()!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func._schema.is_mutable and isinstance(args[0], LazyState):
            fail(
                "unsupported",
                _core.Problem(
                    what=f"{func} would write to a copy of the optimizer's state",
                    where=args[0].place,
                    needed="optimizer.load_state_dict() to change it",
                ),
            )
        plain = lambda each: each.read_now() if isinstance(each, LazyState) else each
        return func(*tree_map(plain, tuple(args)), **tree_map(plain, kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read_now().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.read_now(), memo)
