"""Save the place of a parameter for backward instead of its values. Backward finds them by opening the unit again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ballast._torch_compat import (
    SavedTensorHooks,
    base_of,
    is_in_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from ballast.wrapper.gathered_views import Place
from ballast.wrapper.one_thread import refuse_other_thread
from ballast.wrapper.parameter_casts import CastPlace, place_in_cast
from ballast.wrapper.unit_gather import UnitGather

_KEYS = "ballast_keys"  # an attribute of a function that packs: the gatherers whose parameters it and its outer hooks know


def _knows(hooks: SavedTensorHooks | None, key: object) -> bool:
    return hooks is not None and key in getattr(hooks[0], _KEYS, ())


class _Calls(threading.local):
    """The calls of one thread that have not ended."""

    def __init__(self) -> None:
        self.have_pushed: list[bool] = []  # whether hooks were pushed for each of them


class SavedTensors:
    """Hooks of autograd that are active while modules run, and inside gather(). If a model has several optimizers, the hooks of
    one pass on the parameters of another."""

    def __init__(self, gather: UnitGather, loose_units: Collection[int]):
        self._gather = gather
        self._loose_units = loose_units  # whose parameters are used outside of calls if a method is checkpointed
        self._is_checkpointed = False  # calls inside of others have shown it
        self._outermost = self._hooks(None)
        self._calls = _Calls()
        self._thread: int | None = None  # in which a call has not ended, apart from recomputations of backward passes

    @property
    def is_in_call(self) -> bool:
        return bool(self._calls.have_pushed)

    def beginning_with(self, unit: int | None) -> Callable[[torch.nn.Module], None]:
        """Return the function that begins a call of a module with this unit."""
        gather, of_threads = self._gather, self._calls

        def begin(module: torch.nn.Module) -> None:
            calls = of_threads.have_pushed
            if not calls:
                self._begin_in_thread()
            if gather.before_use is not None:
                gather.before_use(module)
            if gather.is_over:  # since this call began: torch still calls the hooks that existed then
                return
            if not calls:
                gather.casts.are_evaluated = not torch.is_grad_enabled()
            elif not gather.casts.are_evaluated and not torch.is_grad_enabled():
                self._is_checkpointed = True
            if unit is not None:
                gather.open(unit)
            outer = top_saved_tensor_hooks()
            if _knows(outer, gather.key):
                calls.append(False)
                return
            self._is_checkpointed = self._is_checkpointed or bool(calls)
            hooks = self._outermost if outer is None else self._hooks(outer)
            push_saved_tensor_hooks(*hooks)
            calls.append(True)

        return begin

    def _begin_in_thread(self) -> None:
        """Refuse a call while another thread is in one: both would use the memory of one unit."""
        thread = threading.get_ident()
        if self._thread in (None, thread):
            self._thread = thread
        elif not is_in_backward():
            refuse_other_thread("the model")

    def end_call(self, _: torch.nn.Module | None = None) -> None:
        calls = self._calls.have_pushed
        if not calls:  # the call was refused before it began
            return
        if calls.pop():
            pop_saved_tensor_hooks()
        if calls:
            return
        if self._thread == threading.get_ident():
            self._thread = None
        if self._is_checkpointed and self._gather.open_unit in self._loose_units:
            self._gather.release_unit()  # outside of calls, a recomputation would use its parameters without hooks

    def end_all_calls(self) -> None:
        """End calls that were interrupted, from the keyboard for example: torch runs no hooks for them."""
        while self._calls.have_pushed:
            self.end_call()
        self._thread = None

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
        gather, members = self._gather, self._gather.members

        def cast_place(tensor: torch.Tensor) -> CastPlace | None:
            place = place_in_cast(tensor, members, gather.key, gather.updates)
            return None if place is None or place.unit in gather.full else place  # a block may write to full parameters

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:  # a sparse one has no address
                return tensor if outer is None else outer[0](tensor)
            views = gather.now
            address = tensor.data_ptr()
            if views.begin <= address < views.end:
                place = views.place_of(tensor, address, gather.updates)
                if place is not None:
                    return place
                tensor = tensor.clone()  # other values will be in this memory
            elif gather.full and (in_full := gather.place_in_full(tensor)) is not None:
                return in_full
            elif views.has_copies and (of_copy := views.place_of(tensor, address, gather.updates)) is not None:
                return of_copy
            elif tensor.dtype is not views.dtype and (in_cast := cast_place(tensor)) is not None:
                if in_cast.unit == gather.open_unit:
                    gather.casts.add(in_cast.member, base_of(tensor))
                return in_cast
            elif id(tensor) in members:  # a copy, which the parameter will not have in backward
                tensor = tensor.detach()
            return tensor if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> torch.Tensor:
            if type(saved) is Place and saved.key is gather.key:
                unit, number = saved.unit, saved.member
                gather.open(unit)
                if saved.updates != gather.updates or unit in gather.full:
                    gather.require_unchanged(unit, number, saved.updates)
                values = gather.full_values(unit, number) if unit in gather.full else gather.now.tensors[number]
                if not saved.is_whole:
                    values = values.as_strided(saved.size, saved.stride, values.storage_offset() + saved.offset)
                if torch.is_grad_enabled() and not _knows(top_saved_tensor_hooks(), gather.key):
                    return values.clone()  # backward makes a graph, and saves this outside of calls, without these hooks
                return values
            if type(saved) is CastPlace and saved.key is gather.key:
                unit, number = saved.unit, saved.member
                gather.open(unit)
                if saved.updates != gather.updates or unit in gather.full:
                    gather.require_unchanged(unit, number, saved.updates)
                is_full = unit in gather.full
                cast = gather.full_values(unit, number).to(saved.dtype) if is_full else gather.now.cast_of(number, saved.dtype)
                return cast.as_strided(saved.size, saved.stride, saved.offset)
            there: torch.Tensor = saved if outer is None else outer[1](saved)
            return there

        setattr(pack, _KEYS, (gather.key, *(() if outer is None else getattr(outer[0], _KEYS, ()))))
        return pack, unpack
