"""Stage 3: parameters are gathered unit by unit, one unit at a time, wherever torch uses them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from ballast.checks import fail, refuse, refuse_order
from ballast.connecting import Group
from ballast.wrapper.casting import require_no_cast
from ballast.wrapper.gpu import require_stream
from ballast.wrapper.hooks import OfOneModule
from ballast.wrapper.lent import LentTensors
from ballast.wrapper.managed_parameter import ManagedParameter, managed
from ballast.wrapper.memory import tensor_at, views_in
from ballast.wrapper.parameter_state import ParameterState
from ballast.wrapper.stored import Stored
from ballast.wrapper.ungathered import nothing_like
from ballast.wrapper.units import Member, UnitOfMembers
from ballast.wrapper.writes import Slots, Snapshot, agree_on_writes


@dataclass(frozen=True)
class Saved:
    """Instead of what autograd would save of a parameter: where to find it again."""

    unit: int
    member: int  # of the unit
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the member's first


class Window:
    """The unit whose parameters are in memory. Modules open it before they run; what autograd saves for backward of a
    parameter is found again by opening it."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        options: _core.TrainingOptions,
        core: _core.Training,
        units: Sequence[UnitOfMembers],
    ):
        self._model = weakref.ref(model)
        self._core = core
        self._gpu, self._stream = options.gpu, options.stream
        self._group = group
        self._units = units
        self._begins = [core.tensor_begins(unit) for unit in range(len(units))]
        self._lent: dict[tuple[int, int], LentTensors] = {}  # by unit and address
        self._open: int | None = None
        self._said: set[Member] = set()  # of whose views
        self.is_gone = False  # parameters know this window for as long as they live, the training does not live as long
        self._is_over = False  # the same, of what was saved for backward
        self._now = LentTensors((), ())  # the open unit's
        self._whole: set[int] = set()  # units whose parameters are in torch's memory for a while
        self._places = {id(member.parameter): member for unit in units for member in unit.members}
        self._nothing = {
            member: nothing_like(member.parameter, member.parameter.device) for member in self._places.values()
        }
        self._hooks = [
            hook
            for module in model.modules()
            if module is model or self._unit_of(module) is not None
            for hook in self._watch(module)
        ]
        self._depth = 0  # of calls of modules
        self._managed: dict[Member, ManagedParameter] = {}
        for member, nothing in self._nothing.items():
            parameter = member.parameter
            self._managed[member] = managed(parameter) or ManagedParameter(parameter, ParameterState.SHARDED)
            self._managed[member].shard(self, member.unit, nothing)

    # --- Opening and closing ---

    def open(self, unit: int) -> None:
        if unit in self._whole:
            return
        require_stream(self._gpu, self._stream)
        if self._open == unit:
            return
        self._require_there(self._units[unit].members[0])
        self.make_room()
        memory = self._core.lend_parameters(unit)
        key = (unit, memory.address)
        members = self._units[unit].members
        if key not in self._lent:
            with torch.inference_mode(False):  # they are used in training, too
                tensors = views_in(memory, self._units[unit], self._begins[unit], members)
                self._lent[key] = LentTensors(members, tensors)
        self._now = self._lent[key]
        self._open = unit
        for member, view in zip(members, self._now.tensors):
            self._managed[member].gather(view)

    def _require_there(self, member: Member) -> None:
        if self.is_gone:
            refuse_order(
                "a parameter was used whose optimizer is gone, and whose numbers were partitioned over ranks",
                where=f"parameter {member.name}",
                needed="optimizer.close() on all ranks, before it is deleted",
            )
        if self._is_over:
            refuse_order(
                "a backward pass was to go on after the parameters were partitioned anew, or given back",
                where=f"parameter {member.name}",
                needed="a forward pass after the optimizer was closed, or its state loaded",
            )

    def make_room(self) -> None:
        if self._open is None:
            return
        for member in self._units[self._open].members:
            self._put_away(member)
        if self._group.rank == 0:
            self._now.warn_of_views(self._said)
        self._core.give_back()
        self._open = None

    def _put_away(self, member: Member) -> None:
        self._managed[member].reshard(self._nothing[member])
        if self.is_gone:  # inside a block of gather(), which ends now
            self._managed[member].lose()

    @contextmanager
    def using(self, parameters: Sequence[torch.nn.Parameter], operation: str) -> Iterator[None]:
        """They are used together, outside of the modules that they belong to. Those of other units than the last one's are
        copies meanwhile."""
        members = [self._places[id(parameter)] for parameter in parameters]
        self._require_there(members[0])
        if self._depth == 0 and any(self._managed[member].state is not ParameterState.GATHERED for member in members):
            require_no_cast(operation, members[0].name, why="training has begun, and ranks keep shards of it")
            refuse_order(
                "a parameter was used while its numbers are partitioned over ranks",
                where=f"parameter {members[0].name}",
                needed="with ballast.gather(model): ...",
            )
        units = list(dict.fromkeys(member.unit for member in members if member.unit not in self._whole))
        copies = {
            member: self._copy_out(member)
            for unit in units[:-1]
            for member in self._opened(unit)
            if member in members
        }
        for unit in units[-1:]:
            self.open(unit)
        for member, values in copies.items():
            self._managed[member].gather(values)
        try:
            yield
        finally:
            for member in copies:
                self._put_away(member)

    # --- Modules ---

    def _unit_of(self, module: torch.nn.Module) -> int | None:
        """Of parameters of its own."""
        own = next(module.parameters(recurse=False), None)
        return None if own is None else self._places[id(own)].unit

    def _watch(self, module: torch.nn.Module) -> list[Any]:
        unit = self._unit_of(module)
        return [
            module.register_forward_pre_hook(OfOneModule(lambda _: self._begin_call(unit))),
            module.register_forward_hook(OfOneModule(self._end_call), always_call=True),
        ]

    def enter(self, module: torch.nn.Module) -> None:
        self._begin_call(self._unit_of(module))

    def _begin_call(self, unit: int | None) -> None:
        if self._is_over:  # since this call began, which goes through the hooks that there were then
            return
        if unit is not None:
            self.open(unit)
        self._depth += 1
        outer = top_saved_tensor_hooks()
        push_saved_tensor_hooks(*self._savers(outer))

    def _end_call(self, _: torch.nn.Module) -> None:
        if self._depth > 0:  # else refused before it began
            self._leave_call()

    def _leave_call(self) -> None:
        self._depth -= 1
        pop_saved_tensor_hooks()

    def _leave_calls(self) -> None:
        """There are none: what began and is there was interrupted, from the keyboard, say, which torch calls no hooks for."""
        while self._depth > 0:
            self._leave_call()

    def _savers(self, outer: tuple[Any, Any] | None) -> tuple[Any, Any]:
        """What is no parameter goes to whoever saves tensors around here: activation checkpointing, for instance."""

        def pack(tensor: torch.Tensor) -> Any:
            place = self._place_of(tensor)
            if place is not None:
                return place
            if id(tensor) in self._places:  # of a copy, which the parameter will have lost by then
                tensor = tensor.detach()
            return tensor if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> Any:
            if isinstance(saved, Saved):
                self.open(saved.unit)
                whole = self._now.tensors[saved.member]
                return whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.offset)
            return saved if outer is None else outer[1](saved)

        return pack, unpack

    def _place_of(self, tensor: torch.Tensor) -> Saved | None:
        if self._open is None:
            return None
        address = tensor.data_ptr()
        for number, view in enumerate(self._now.tensors):
            offset = address - view.data_ptr()
            if 0 <= offset < view.nbytes:
                elements = offset // view.element_size()
                return Saved(self._open, number, tuple(tensor.shape), tensor.stride(), elements)
        return None

    # --- Looking at parameters, and changing them ---

    @property
    def group(self) -> Group:
        return self._group

    def begin(self) -> None:
        """Numbers are there."""

    @contextmanager
    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> Iterator[None]:
        """Hold these parameters whole inside the block, and keep what is written to them. All ranks do this together."""
        slots = Slots(self._model(), parameters)
        units = sorted({self._places[id(parameter)].unit for parameter in parameters} - self._whole)
        copies = {member: self._copy_out(member) for unit in units for member in self._opened(unit)}
        self.make_room()
        for member, values in copies.items():
            self._managed[member].gather(values)
        snapshots = {member: Snapshot(member.parameter) for member in copies} if keeps_writes else {}
        self._whole |= set(units)
        outer = top_saved_tensor_hooks()
        push_saved_tensor_hooks(*self._savers(outer))  # backward may come later
        has_failed = False
        try:
            yield
        except BaseException:
            has_failed = True
            raise
        finally:
            pop_saved_tensor_hooks()
            try:
                if keeps_writes and self._agree_to_keep(has_failed):
                    self._keep_writes(snapshots, slots)
            finally:
                self._whole -= set(units)
                for member in copies:
                    self._put_away(member)

    def _opened(self, unit: int) -> list[Member]:
        self.open(unit)
        return self._units[unit].members

    def _copy_out(self, member: Member) -> torch.Tensor:
        return self._now.tensors[member.tensor].clone()

    def _agree_to_keep(self, has_failed: bool) -> bool:
        """Return whether the block has ended in the same way on all ranks. Where it failed on others only, this rank fails."""
        failed = self._group.all_reduce([int(has_failed and rank == self._group.rank) for rank in range(self._group.size)])
        if all(failed) or not any(failed):
            return True
        if not has_failed:
            ranks = ", ".join(str(rank) for rank, count in enumerate(failed) if count)
            what = "a block of ballast.gather() failed on other ranks: what was written in it is not kept"
            fail("peer_failed", _core.Problem(what=what, where=f"rank {ranks}"))
        return False

    def _keep_writes(self, snapshots: Mapping[Member, Snapshot], slots: Slots) -> None:
        mine = [member for member, snapshot in snapshots.items() if snapshot.differs(member.parameter)]
        before = {member: snapshot.values for member, snapshot in snapshots.items()}
        written = agree_on_writes(self._group, before, mine, slots.require_unchanged)
        if not written:
            return
        kept = {
            (member.unit, member.tensor): member.parameter.detach().to("cpu").contiguous().view(-1) for member in written
        }

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            values = kept.get((unit, tensor))
            if values is not None:
                tensor_at(into, count, values.dtype).copy_(values[first : first + count])
            return values is not None

        self._core.write_parameters(fill)

    def write(self, values: Mapping[torch.nn.Parameter, Stored]) -> None:
        """From files into what each rank keeps. All ranks do this together."""
        self.make_room()
        stored = {}
        for parameter, each in values.items():
            member = self._places[id(parameter)]
            if member.unit in self._whole:
                parameter.detach().copy_(each.read_whole())
            else:
                stored[member.unit, member.tensor] = each

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            found = stored.get((unit, tensor))
            if found is not None:
                found.read(first, count, into)
            return found is not None

        self._core.write_parameters(fill)

    # --- As a residence ---

    def after_step(self) -> None:
        """Updates go on while the next forward pass begins."""
        self._leave_calls()

    def writes(self) -> dict[Member, torch.Tensor]:
        """None that are not kept already, when a `gather()` ends."""
        return {}

    def require_takeable(self) -> None:
        """The same."""

    def take_over(self) -> None:
        """The same."""

    def require_not_cast(self) -> None:
        """Nobody can cast what is not there."""

    def undo_casts(self) -> None:
        """Parameters inside of gather() are copies."""

    def require_hideable(self, parameters: bool) -> None:
        if not parameters:
            refuse(
                "parameters were to stay on the device, in stage 3",
                needed="offload() of all, or a stage below 3: memory that parameters are gathered into goes too",
            )

    def require_put_away(self, what: str) -> None:
        """Nothing is in torch's memory for a while."""
        if self._whole:
            refuse_order(
                f"{what} while parameters are gathered",
                where=f"parameter {self._units[min(self._whole)].members[0].name}",
                needed="the same outside of `with ballast.gather(...)`",
            )

    def hide(self) -> None:
        """Nothing is gathered between calls."""
        self._lent, self._now = {}, LentTensors((), ())
        for each in self._managed.values():
            each.offload(self)

    def show(self) -> None:
        """Parameters are gathered again where they are used."""
        for each in self._managed.values():
            if each.state is ParameterState.OFFLOADED:
                each.reload()

    def release(self, together: bool, gathers: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        if together and gathers:
            self._give_back_all()
        self.make_room()
        self._leave_calls()
        self.is_gone, self._is_over = not together, True
        for each in self._managed.values() if self.is_gone else ():
            if each.state is not ParameterState.GATHERED:  # else when the block ends that it is gathered in
                each.lose()
        self._lent, self._now = {}, LentTensors((), ())
        del self._core

    def _give_back_all(self) -> None:
        for number in range(len(self._units)):
            copies = [(member, self._copy_out(member)) for member in self._opened(number)]
            self.make_room()
            for member, values in copies:
                self._managed[member].release(values)
