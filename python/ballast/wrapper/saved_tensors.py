"""Save the place of a parameter for backward instead of its values. Backward finds them by opening the unit again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ballast._torch_compat import (
    SavedTensorHooks,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from ballast.wrapper.unit_gather import UnitGather


@dataclass(frozen=True)
class Saved:
    """The place of a view of a parameter."""

    unit: int
    member: int  # of the unit
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the member's first


class SavedTensors:
    """Hooks of autograd that are active while modules run, and inside gather()."""

    def __init__(self, gather: UnitGather):
        self._gather = gather
        self._depth = 0  # the number of calls that have not ended

    @property
    def is_in_call(self) -> bool:
        return self._depth > 0

    def begin_call(self) -> None:
        self._depth += 1
        push_saved_tensor_hooks(*self._hooks(top_saved_tensor_hooks()))

    def end_call(self) -> None:
        if self._depth > 0:  # otherwise the call was refused before it began
            self._depth -= 1
            pop_saved_tensor_hooks()

    def end_all_calls(self) -> None:
        """End calls that were interrupted, from the keyboard for example: torch runs no hooks for them."""
        while self._depth > 0:
            self.end_call()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Activate the hooks inside the block, outside of calls."""
        push_saved_tensor_hooks(*self._hooks(top_saved_tensor_hooks()))
        try:
            yield
        finally:
            pop_saved_tensor_hooks()

    def _hooks(self, outer: SavedTensorHooks | None) -> SavedTensorHooks:
        """Return hooks that pass other tensors on to the outer hooks, such as those of activation checkpointing."""

        def pack(tensor: torch.Tensor) -> Any:
            place = self._place_of(tensor)
            if place is not None:
                return place
            if self._gather.has(tensor):  # a copy, which the parameter will not have in backward
                tensor = tensor.detach()
            return tensor if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, Saved):
                full = self._gather.values_of(saved.unit, saved.member)
                return full.as_strided(saved.size, saved.stride, full.storage_offset() + saved.offset)
            there: torch.Tensor = saved if outer is None else outer[1](saved)
            return there

        return pack, unpack

    def _place_of(self, tensor: torch.Tensor) -> Saved | None:
        unit = self._gather.open_unit
        if unit is None:
            return None
        address = tensor.data_ptr()
        for number, view in enumerate(self._gather.now.tensors):
            offset = address - view.data_ptr()
            if 0 <= offset < view.nbytes:
                elements = offset // view.element_size()
                return Saved(unit, number, tuple(tensor.shape), tensor.stride(), elements)
        return None
