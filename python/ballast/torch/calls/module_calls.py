"""Calls of modules in stage 3. A module's unit is opened before its call, in which autograd saves the place of a parameter
instead of its values. Backward finds these by opening the unit again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ballast._torch_compat import (
    SavedTensorHooks,
    base_of,
    call_around,
    compiled_modules,
    compiler_of_calls,
    is_in_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
)
from ballast.torch.calls.hooks import ModuleHook, refuse_other_thread
from ballast.torch.parameters.managed_parameter import Lifecycle
from ballast.torch.parameters.unit_gather import Place, UnitGather
from ballast.torch.parameters.units import UnitParameter

_OPEN = Lifecycle.OPEN  # each call of a module needs it, so nothing looks it up
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
            if gather.on_call_between_steps is not None:
                gather.on_call_between_steps(module)
            if gather.lifecycle is not _OPEN:  # since this call began: torch still calls the hooks that existed then
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

    def end_call(self, module: torch.nn.Module | None = None) -> None:
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
        if module is not None and self._gather.after_call is not None and (tell := self._gather.after_call()) is not None:
            tell()

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


_CAST = "ToCopyBackward0"
# Views of all elements. Of such a view of a parameter, a cast has the parameter's order in memory.
_VIEWS_OF_ALL = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "MovedimBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0"),
}
_MOST_VIEWS = 8  # of a view; a parameter is at the end of a short chain


class CastPlace(NamedTuple):
    """The place of a view in a cast of a parameter."""

    key: object  # of the gatherer whose unit it is
    unit: int
    member: int  # of the unit
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the cast's first
    updates: int  # that the gatherer had counted


def place_in_cast(tensor: torch.Tensor, members: Mapping[int, UnitParameter], key: object, updates: int) -> CastPlace | None:
    """Return the place of a tensor that is a cast of one of these parameters (by id), or a view of such a cast; None if it
    is not known to be one. `key` is that of the parameters' gatherer, which has counted this many `updates`.

    The graph of autograd shows it, so a cast of a frozen parameter is not found."""
    cast = base_of(tensor)
    if cast.grad_fn is None or cast.grad_fn.name() != _CAST:
        return None
    if tensor.dtype != cast.dtype or cast._version != 0:  # other bits are seen, or were written
        return None
    parameter = _source_of(cast.grad_fn)
    member = members.get(id(parameter))
    if member is None or parameter is None or not _has_all(cast, parameter):
        return None
    return CastPlace(
        key, member.unit, member.tensor, cast.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), updates
    )


def _source_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose elements, all of them, this node casts."""
    for _ in range(_MOST_VIEWS):
        node = node.next_functions[0][0]
        if node is None:
            return None
        variable: torch.Tensor | None = getattr(node, "variable", None)
        if variable is not None or node.name() not in _VIEWS_OF_ALL:
            return variable
    return None


def _has_all(cast: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the cast has the elements of the parameter in the order in which they are in memory."""
    dense = sorted(zip(cast.stride(), cast.shape))
    expected = 1
    for stride, size in dense:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return bool(cast.numel() == parameter.numel() and cast.storage_offset() == 0 and cast.device == parameter.device)


class EndOfCall(ModuleHook):
    """The hook at the end of a module's call. In the place of views of gathered memory, the module returns views of copies."""

    def __init__(self, hook: Callable[[torch.nn.Module], None], gather: UnitGather):
        super().__init__(hook)
        self._gather = gather

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> Any:
        if is_dynamo_compiling() or compiler_of_calls() is not None:
            super().__call__(module)
            return None
        output = self._apart(arguments[-1]) if arguments else None
        self._hook(module)
        return output

    def _apart(self, output: Any) -> Any:
        """Return the output without views of gathered memory; None if it has none."""
        if isinstance(output, torch.Tensor):
            return self._gather.copy_of_view(output)
        if not isinstance(output, (tuple, list, dict)):
            return None
        values, structure = tree_flatten(output)
        copies = [self._gather.copy_of_view(each) if isinstance(each, torch.Tensor) else None for each in values]
        if all(each is None for each in copies):
            return None
        return tree_unflatten([value if copy is None else copy for value, copy in zip(values, copies)], structure)


Begin = Callable[[torch.nn.Module], None]


class CompiledBlocks:
    """The compiled modules inside a model with parameters of one unit. Others keep their hooks, which cut graphs. `members` are
    those of one optimizer."""

    def __init__(self, model: torch.nn.Module, members: Mapping[int, UnitParameter]):
        self._blocks: dict[torch.nn.Module, tuple[torch.nn.Module, int]] = {}  # by the module that is called: inside, and unit
        for inside, called in compiled_modules(model):
            units = {members[id(each)].unit for each in inside.parameters() if id(each) in members}
            if inside is not model and called is not model and len(units) == 1:
                self._blocks[called] = (inside, units.pop())
        self._inside = {id(module) for inside, _ in self._blocks.values() for module in inside.modules()}
        self._handles: list[Callable[[], None]] = []

    def has(self, module: torch.nn.Module) -> bool:
        """Return whether the module is in a block, whose unit is gathered already when compiled code calls the module."""
        return id(module) in self._inside

    def watch(self, beginning_with: Callable[[int], Begin], end: Begin) -> None:
        """Let each block begin with its unit, outside of the compiled code."""
        for called, (inside, unit) in self._blocks.items():
            begin = beginning_with(unit)
            if called is inside:
                self._handles.append(call_around(called, begin, end))
            else:
                before = called.register_forward_pre_hook(ModuleHook(begin))
                after = called.register_forward_hook(ModuleHook(end), always_call=True)
                self._handles += [before.remove, after.remove]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop()()
