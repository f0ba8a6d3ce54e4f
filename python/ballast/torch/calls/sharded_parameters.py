"""Stage 3: parameters are gathered unit by unit, wherever torch uses them, and stay full inside blocks of gather().

A module's unit is opened before its call, in which autograd saves the place of a parameter instead of its values. Backward
finds these by opening the unit again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ballast import _core
from ballast._torch_compat import (
    SavedTensorHooks,
    base_of,
    call_around,
    compiled_modules,
    compiler_of_calls,
    is_in_backward,
    packs_for_checkpointing,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
    without_torch_function,
)
from ballast.checks import refuse, refuse_order
from ballast.ranks import Group, fail_with_peers, failed_ranks, parts_of
from ballast.torch.calls.hooks import ModuleHook, refuse_other_thread
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.gathered_memory import GatheredMemory
from ballast.torch.parameters.managed_parameter import OFF_DEVICE, Lifecycle, kind_of, plain, refuse_access, require_no_cast
from ballast.torch.parameters.parameter_memory import ParameterMemory
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.parameters.unit_gather import GatherObserver, Place, UnitGather
from ballast.torch.parameters.units import ParameterUnit, UnitParameter
from ballast.torch.parameters.writes import LOST_WRITE, Slots, Snapshot, agree_on_writes, refuse_lost_writes
from ballast.torch.parts import ATTRIBUTE, packing_local_tensors

log = logging.getLogger("ballast")

MOST_COPIED = 4 << 20  # bytes of a parameter that is copied so that views of it stay as they are


def is_small(parameter: torch.Tensor) -> bool:
    with without_torch_function():
        return bool(parameter.nbytes <= MOST_COPIED)


class ShardedParameters(ParameterMemory):
    """The owner of sharded parameters. Modules open a unit before they run; operations outside of modules, and blocks
    of gather(), open what they use. Writes are kept when a block of gather() ends."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        options: _core.TrainingOptions,
        core: _core.Training,
        units: Sequence[ParameterUnit],
    ):
        self.group = group
        self._core = core
        self._model = weakref.ref(model)
        self._gather = UnitGather(core, units, options, warns=group.rank == 0)
        loose = self._loose_members(model)
        self._gather.copy_where_open(member for member in loose if is_small(member.parameter))
        self._saved = SavedTensors(self._gather, {member.unit for member in loose})
        self._compiled = CompiledBlocks(model, self._gather.members)
        self._hooks: list[Any] = []
        try:  # an interrupt may arrive
            for module in filter(self._is_watched, model.modules()):
                self._hooks += self._watch(module)
            self._compiled.watch(self._saved.beginning_with, self._saved.end_call)
            self._gather.take(self)
        except BaseException:
            self._unwatch()
            raise
        keep_packing(model, warns=group.rank == 0)
        self.gathered_memory: GatheredMemory | None = None  # None once it needs no more looks at the memory

    # --- As the owner of parameters ---

    @property
    def lifecycle(self) -> Lifecycle:
        return self._gather.lifecycle

    def begin(self) -> None:
        """Do nothing: training has begun."""

    @contextmanager
    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> Iterator[None]:
        """Gather parameters that one operation uses, outside the calls of their modules. Those of all units but the
        last are copies inside the block. All of them are copies if they are `copied`, because the result is a view, and other
        units may be opened before it is used; but only small ones. A backward pass outside of calls gets copies too: if it
        recomputes, autograd saves parameters without the hooks of this training, or before other units are opened."""
        members = [self._gather.member_of(parameter) for parameter in parameters]
        self._gather.require_there(members[0])
        is_apart = not self._saved.is_in_call and is_in_backward()
        is_refused = not (again or is_apart or self._saved.is_in_call)
        if is_refused and not all(self._gather.is_gathered(member) for member in members):
            require_no_cast(operation, members[0].name, why="training has begun, and ranks keep shards of it")
            if self._gather.is_offloaded:
                refuse_access(members[0].name, OFF_DEVICE, "optimizer.reload(), on all ranks")
            refuse_access(members[0].name, "its values are partitioned over ranks", "with ballast.gather(model): ...")
        units = list(dict.fromkeys(member.unit for member in members if member.unit not in self._gather.full))
        copied = copied and all(is_small(parameter) for parameter in parameters)
        if self._saved.is_in_call:
            self._saved.note_use(units)
        copies_all = is_apart or copied
        first_in_place = len(units) if copies_all else max(len(units) - 1, 0)
        copies = {
            member: self._gather.copy_out(member)
            for unit in units[:first_in_place]
            for member in self._gather.opened(unit)
            if member in members
        }
        if copies_all:
            self._gather.hide_unit()
        for unit in units[first_in_place:]:
            self._gather.open(unit)
        for member, values in copies.items():
            self._gather.show(member, values)
        try:
            with self._saved.watching() if is_apart else nullcontext():
                yield
        finally:
            written = self._gather.reshard(copies)
        if copied:
            self._gather.expect_no_writes(copies)
        if written:
            refuse_lost_writes(written)

    # --- Blocks of gather() ---

    @contextmanager
    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> Iterator[None]:
        """Hold copies of these parameters full inside the block, and keep writes to them. All ranks enter and leave it
        together."""
        gather = self._gather
        slots = Slots(self._model(), parameters)
        units = sorted({gather.member_of(parameter).unit for parameter in parameters} - gather.full)
        copies = gather.copies_of(units)
        gather.release_unit()
        gather.hold(units, copies)
        snapshots = {member: Snapshot(member.parameter) for member in copies} if keeps_writes else {}
        failure: dict[str, str] | None = None
        try:
            with self._saved.watching():
                yield
        except BaseException as error:
            failure = parts_of(error)
            raise
        finally:
            try:
                if keeps_writes and self._agree_to_keep(failure):
                    with gather.in_stream():  # a program may leave the block in another stream
                        self._keep_writes(snapshots, slots)
            finally:
                gather.let_go(units, copies)

    def _agree_to_keep(self, failure: dict[str, str] | None) -> bool:
        """Return whether the block has ended in the same way on all ranks. Raise where it failed on other ranks only."""
        failed = failed_ranks(self.group, failure is not None)
        if len(failed) in (0, self.group.size):
            return True
        fail_with_peers(self.group, "cannot keep writes: a block of ballast.gather()", failed, failure)
        return False

    def _keep_writes(self, snapshots: Mapping[UnitParameter, Snapshot], slots: Slots) -> None:
        mine = [member for member, snapshot in snapshots.items() if snapshot.differs(member.parameter)]
        before = {member: snapshot.values for member, snapshot in snapshots.items()}
        written = agree_on_writes(self.group, before, mine, slots.require_unchanged)
        if not written:
            return
        gather = self._gather
        kept = {(member.unit, member.tensor): plain(member.parameter).to("cpu").contiguous().view(-1) for member in written}

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            values = kept.get((unit, tensor))
            if values is not None:
                first, count = gather.units[unit].members[tensor].parameter_range(first, count)
                tensor_at(into, count, values.dtype).copy_(values[first : first + count])
            return values is not None

        gather.count_writes(gather.counted_writes())
        self._core.write_parameters(fill)

    def write(self, values: Mapping[torch.nn.Parameter, StoredTensor]) -> None:
        """Read files into the shards, and into the copies of a block. All ranks call it together."""
        self._gather.release_unit()
        stored, written = {}, []
        for parameter, each in values.items():
            member = self._gather.member_of(parameter)
            if member.unit in self._gather.full:
                parameter.detach().copy_(each.read_all())
            else:
                stored[member.unit, member.tensor] = each
                written.append(member)
        self._gather.count_writes(written)

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            found = stored.get((unit, tensor))
            if found is not None:
                found.read(*self._gather.units[unit].members[tensor].parameter_range(first, count), into)
            return found is not None

        self._core.write_parameters(fill)

    # --- Modules ---

    def _unit_of(self, module: torch.nn.Module) -> int | None:
        """Return the unit of the module's own parameters, if this optimizer keeps any of them."""
        members = self._gather.members
        own = next((each for each in module.parameters(recurse=False) if id(each) in members), None)
        return None if own is None else self._gather.member_of(own).unit

    def _loose_members(self, model: torch.nn.Module) -> set[UnitParameter]:
        """Return parameters that a module has apart from those of modules in it. Between two uses of them, or of views of them,
        its forward may call those modules. If a method of the module is checkpointed, the recomputation uses them between
        calls of other units, and outside of the module's own call."""
        found: set[UnitParameter] = set()
        for module in model.modules():
            own, inside = (
                {self._gather.member_of(each) for each in module.parameters(recurse) if id(each) in self._gather.members}
                for recurse in (False, True)
            )
            found |= own if {each.unit for each in own} < {each.unit for each in inside} else set()
        return found

    def _watch(self, module: torch.nn.Module) -> list[Any]:
        begin = ModuleHook(self._saved.beginning_with(self._unit_of(module)))
        end = EndOfCall(self._saved.end_call, self._gather)
        begin.cuts_graphs = end.cuts_graphs = not self._compiled.has(module)
        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]

    def on_module_call(self, module: torch.nn.Module) -> None:
        if self._is_watched(module):
            self._saved.beginning_with(self._unit_of(module))(module)

    def _is_watched(self, module: torch.nn.Module) -> bool:
        return module is self._model() or self._unit_of(module) is not None

    # --- As the memory of a partition ---

    def release_unit(self) -> None:
        if written := self._gather.close_unit():
            refuse_lost_writes(written)

    def tell_of_calls(self, tell: Callable[[torch.nn.Module], None] | None) -> None:
        self._gather.on_call_between_steps = tell

    def watch_gathers(self, observer: weakref.ref[GatherObserver]) -> None:
        self._gather.observer = observer

    def after_step(self, result: _core.StepResult) -> None:
        """Forget calls that were interrupted. Updates continue while the next forward pass begins."""
        self._saved.end_all_calls()
        if not result.skipped:
            self._gather.count_update()
        if self.gathered_memory is not None and not self.gathered_memory.after_step(result.metrics):
            self.gathered_memory = None

    def after_load(self) -> None:
        self._gather.count_writes(self._gather.members.values())

    def require_offloadable(self, parameters: bool) -> None:
        if not parameters:
            refuse(
                "cannot leave parameters on the device: stage 3 gathers them into memory that is freed too",
                needed="offload() of all, or a stage below 3",
            )

    def require_not_gathered(self, what: str) -> None:
        if self._gather.full:
            refuse_order(
                f"{what}: parameters are gathered",
                where=f"parameter {self._gather.units[min(self._gather.full)].members[0].name}",
                needed="the same outside of `with ballast.gather(...)`",
            )

    def offload(self) -> None:
        self._gather.offload(self)

    def reload(self) -> None:
        self._gather.reload()

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._compiled.remove()

    def release(self, together: bool, gathers: bool, keeps: bool) -> None:
        self._unwatch()
        if written := self._gather.close_unit():
            log.warning("%s: parameter %s", LOST_WRITE, ", ".join(written))
        if together and gathers and not self._gather.are_collected():
            self._gather.release_values()
        self._saved.end_all_calls()
        self._gather.end(Lifecycle.CLOSED if together and keeps else Lifecycle.LOST)
        del self._core  # its memory can be freed then


def keep_packing(model: torch.nn.Module, *, warns: bool) -> None:
    """Keep modules from packing their weights anew in an evaluation on a CPU: the parameter would change outside of its
    memory. Warn of modules that keep a copy of their weights."""
    copies = None
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
        weight = module._parameters.get("weight")  # an attribute may be computed: torch's parametrizations do that
        if weight is not None and kind_of(weight).__name__ == "Int8Params":
            copies = copies or name
    if copies is not None and warns:
        log.warning(
            "module %s keeps a full copy of its 8-bit weights, as all of bitsandbytes' 8-bit modules do: stage 3 saves no "
            "memory there. Those of 4 bits are partitioned.",
            copies,
        )


# --- Calls of modules ---

_OPEN = Lifecycle.OPEN  # each call of a module needs it, so nothing looks it up
_RECOMPUTES = "ballast_recomputes"  # an attribute of a function that packs inside of activation checkpointing
_KEYS = "ballast_keys"  # an attribute of a function that packs: the gatherers whose parameters it and its outer hooks know
NOTHING = torch.empty(0, device="cpu")  # stands for a parameter where checkpointing counts saved tensors


def _knows(hooks: SavedTensorHooks | None, key: object) -> bool:
    return hooks is not None and key in getattr(hooks[0], _KEYS, ())


class _Calls(threading.local):
    def __init__(self) -> None:
        self.have_pushed: list[bool] = []  # whether hooks were pushed for each of them


class SavedTensors:
    """Hooks of autograd that are active while modules run, and inside gather(). If a model has several optimizers, the hooks of
    one pass on the parameters of another."""

    def __init__(self, gather: UnitGather, loose_units: set[int]):
        self._gather = gather
        self._loose_units = loose_units  # units whose parameters are used outside of calls if a method is checkpointed
        self._apart: set[int] = set()  # those units, once calls inside of others have shown that one is checkpointed
        self._has_parts = any(hasattr(member.parameter, ATTRIBUTE) for member in gather.members.values())
        self._outermost = self._hooks(None)
        self._calls = _Calls()
        self._thread: int | None = None  # the thread whose call has not ended, apart from recomputations of backward passes

    @property
    def is_in_call(self) -> bool:
        return bool(self._calls.have_pushed)

    def note_use(self, units: Iterable[int]) -> None:
        """Note the use of parameters of these units by another module. It may be one of a checkpointed function, or of a
        torch.autograd.Function, whose forward pass records nothing either."""
        is_evaluated_inside = not torch.is_grad_enabled() and not self._gather.casts.are_evaluated
        if is_evaluated_inside or not _knows(top_saved_tensor_hooks(), self._gather.key):
            self._loose_units.update(units)
            self._apart.update(self._loose_units)

    def beginning_with(self, unit: int | None) -> Callable[[torch.nn.Module], None]:
        """Return the function that begins a call of a module with this unit."""
        gather, thread_calls = self._gather, self._calls

        def begin(module: torch.nn.Module) -> None:
            calls = thread_calls.have_pushed
            if not calls:
                self._begin_in_thread()
            if gather.on_call_between_steps is not None:
                gather.on_call_between_steps(module)
            if gather.lifecycle is not _OPEN:  # the lifecycle changed in this call: torch still calls the hooks it began with
                return
            if not calls:
                gather.casts.are_evaluated = not torch.is_grad_enabled()
            elif not gather.casts.are_evaluated and not torch.is_grad_enabled():
                self._apart.update(self._loose_units)
            if unit is not None:
                gather.open(unit)
            outer = top_saved_tensor_hooks()
            if _knows(outer, gather.key):
                calls.append(False)
                return
            if calls:
                self._apart.update(self._loose_units)
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
        if self._gather.open_unit in self._apart:
            self._gather.hide_unit()  # a recomputation outside of calls would use its parameters without hooks
        if module is not None and self._gather.observer is not None and (observer := self._gather.observer()) is not None:
            observer.after_call()

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
        gather, members, apart = self._gather, self._gather.members, self._apart

        def cast_place(tensor: torch.Tensor) -> Place | None:
            place = place_in_cast(tensor, members, gather.key, gather.updates)
            return None if place is None or place.unit in gather.full else place  # a block may write to full parameters

        def pack(tensor: torch.Tensor) -> Any:
            try:
                address = tensor.data_ptr()  # opens the unit of a parameter that a torch.autograd.Function saves
            except RuntimeError:  # it has no memory: it is sparse, or torch.export() uses it
                if id(tensor) in members:
                    raise
                return tensor if outer is None else outer[0](tensor)
            views = gather.now
            if views.begin <= address < views.end:
                place = views.place_of(tensor, address, gather.updates)
                if place is not None:
                    return place
                tensor = tensor.clone()  # other values will be in this memory
            elif gather.full and (in_full := gather.place_in_full(tensor)) is not None:
                return in_full
            elif views.has_copies and (in_copy := views.place_of(tensor, address, gather.updates)) is not None:
                return in_copy
            elif tensor.dtype is not views.dtype and (in_cast := cast_place(tensor)) is not None:
                if in_cast.unit == gather.open_unit:
                    gather.casts.add(in_cast.member, base_of(tensor))
                return in_cast
            elif id(tensor) in members:  # a copy, which the parameter will not have in backward
                tensor = tensor.detach()
            return tensor if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> torch.Tensor:
            if type(saved) is not Place or saved.key is not gather.key:
                there: torch.Tensor = saved if outer is None else outer[1](saved)
                return there
            unit, number = saved.unit, saved.member
            gather.open(unit)
            if saved.updates != gather.updates or unit in gather.full:
                gather.require_unchanged(unit, number, saved.updates)
            # Backward with a graph, or of a torch.autograd.Function, saves the values without these hooks, or keeps them.
            lends = unit in apart or (torch.is_grad_enabled() and not _knows(top_saved_tensor_hooks(), gather.key))
            values = gather.full_values(unit, number) if unit in gather.full else gather.now.tensors[number]
            if saved.cast is not None:
                values = values.to(saved.cast) if unit in gather.full else gather.now.cast_of(number, saved.cast)
            elif lends:
                values = values.clone() if unit in gather.full else gather.lend(number)
            if unit in apart:  # a recomputation would use the others of the unit without hooks
                gather.hide_unit()
            strided = saved.size, saved.stride, values.storage_offset() + saved.offset
            return values if saved.is_whole else values.as_strided(*strided)

        hooks: SavedTensorHooks = (pack, unpack)
        if recomputes := outer is not None and getattr(outer[0], _RECOMPUTES, packs_for_checkpointing(outer[0])):
            hooks = recomputing_first(hooks, outer, gather.key)
        hooks = packing_local_tensors(*hooks) if self._has_parts else hooks
        setattr(hooks[0], _KEYS, (gather.key, *(() if outer is None else getattr(outer[0], _KEYS, ()))))
        setattr(hooks[0], _RECOMPUTES, recomputes)
        return hooks


class AfterRecomputation(NamedTuple):
    place: Place
    recomputed: Any  # what checkpointing has packed; to unpack it makes the recomputation


def recomputing_first(hooks: SavedTensorHooks, outer: SavedTensorHooks, key: object) -> SavedTensorHooks:
    """Let a recomputation come before a parameter in it is used. Autograd unpacks the tensors of an operator one by one. If the
    parameter were the first of them, the recomputation for the next one would release its unit."""
    pack_place, unpack_place = hooks

    def pack(tensor: torch.Tensor) -> Any:
        saved = pack_place(tensor)
        return AfterRecomputation(saved, outer[0](NOTHING)) if type(saved) is Place and saved.key is key else saved

    def unpack(saved: Any) -> torch.Tensor:
        if type(saved) is AfterRecomputation and saved.place.key is key:
            outer[1](saved.recomputed)
            saved = saved.place
        return unpack_place(saved)

    return pack, unpack


# --- Casts of parameters, which autograd saves too ---

_CAST = "ToCopyBackward0"
# Views of all elements. Of such a view of a parameter, a cast has the parameter's order in memory.
_VIEWS_OF_ALL = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "MovedimBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0"),
}
_MOST_VIEWS = 8  # views of a view; a parameter is at the end of a short chain


def place_in_cast(tensor: torch.Tensor, members: Mapping[int, UnitParameter], key: object, updates: int) -> Place | None:
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
    size, offset = tuple(tensor.shape), tensor.storage_offset()
    return Place(key, member.unit, member.tensor, size, tensor.stride(), offset, False, cast.dtype, updates)


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


# --- The ends of calls, and calls of compiled modules ---


class EndOfCall(ModuleHook):
    """The hook at the end of a module's call. In the place of views of gathered memory, the module returns views of copies."""

    def __init__(self, hook: Callable[[torch.nn.Module], None], gather: UnitGather):
        super().__init__(hook)
        self._copy_of_view = gather.copy_of_view

    def __call__(self, module: torch.nn.Module, inputs: Any = None, output: Any = None) -> Any:
        if is_dynamo_compiling() or compiler_of_calls() is not None:
            super().__call__(module)
            return None
        copies = self._copy_of_view(output) if type(output) is torch.Tensor else self._copies_in(output)
        self._hook(module)
        return copies

    def _copies_in(self, output: Any) -> Any:
        """Return the output with copies in the place of views of gathered memory; None if it has none."""
        if not isinstance(output, (tuple, list, dict)):
            return None
        values, structure = tree_flatten(output)
        copies = [self._copy_of_view(each) if type(each) is torch.Tensor else None for each in values]
        if all(each is None for each in copies):
            return None
        return tree_unflatten([value if copy is None else copy for value, copy in zip(values, copies)], structure)


Begin = Callable[[torch.nn.Module], None]


class CompiledBlocks:
    """The compiled modules inside a model with parameters of one unit. Others keep their hooks, which cut graphs. `members` are
    those of one optimizer."""

    def __init__(self, model: torch.nn.Module, members: Mapping[int, UnitParameter]):
        self._blocks: dict[torch.nn.Module, tuple[torch.nn.Module, int]] = {}  # module inside and its unit, by called module
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
