"""The unit whose parameters torch sees in stage 3: one at a time, because the next one uses the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from ballast import _core
from ballast._torch_compat import storage_address
from ballast.checks import refuse_order
from ballast.wrapper.autocast_cache import CachedCasts
from ballast.wrapper.gathered_views import NO_VIEWS, GatheredViews, Place
from ballast.wrapper.gpu import in_stream, require_stream
from ballast.wrapper.managed_parameter import ManagedParameter, ParameterOwner, managed
from ballast.wrapper.memory import views_in
from ballast.wrapper.parameter_state import ParameterState
from ballast.wrapper.ungathered import nothing_like, plain
from ballast.wrapper.units import Member, UnitOfMembers
from ballast.wrapper.unused_units import naming_unused_units
from ballast.wrapper.writes import refuse_lost_writes


class UnitGather:
    """Opens units, and releases the open one. Parameters can also be copied out: such copies stay until they are
    resharded.

    Parameters may outlive the training. After its end no unit can be opened.
    """

    def __init__(
        self, core: _core.Training, units: Sequence[UnitOfMembers], options: _core.TrainingOptions, *, warns: bool
    ):
        self._core = core
        self.key = object()  # of places in these units
        self._gathers_codes = core.gathers_codes
        self._gpu, self._stream = options.gpu, options.stream
        self._warns = warns  # one rank warns of views that outlive their parameter
        self._begins = [core.tensor_begins(unit) for unit in range(len(units))]
        self._views: dict[tuple[int, int], GatheredViews] = {}  # by unit and address
        self._copied: dict[int, set[Member]] = {}  # by unit: members whose views may outlive the time in which it is open
        self._warned: set[Member] = set()  # members whose views were named in a warning
        self.members = {id(member.parameter): member for unit in units for member in unit.members}  # by id of the parameter
        self._nothing = {
            member: nothing_like(member.parameter, member.parameter.device) for member in self.members.values()
        }
        self._managed: dict[Member, ManagedParameter] = {}
        self._of_unit: list[list[ManagedParameter]] = []  # each list in the order of the unit's members
        self._nothing_of_unit: list[list[torch.Tensor]] = []
        self.units = units
        self.updates = 0  # of all parameters that are trained, and writes to any
        self._updated_at = 0  # `updates` after the last update by a step
        self._written_at: dict[Member, int] = {}  # `updates` after the last write
        self._begun_full: dict[Member, tuple[int, int]] = {}  # torch's count of writes and the address, when a block began
        self._full_places: dict[int, Member] = {}  # by address of the memory that a block of gather() shows
        self._viewed: set[Member] = set()  # of whose copies views may be there, since the last release
        self.now = NO_VIEWS  # the open unit's
        self.casts = CachedCasts()
        self.open_unit: int | None = None
        self._is_exact = False  # whether the open unit has the parameters that ranks keep, although gathers are encoded
        self.full: set[int] = set()  # units that a block of gather() holds full
        self.is_gone = False  # the training has ended, and the values are lost
        self.is_over = False  # the training has ended, or another partition has the values
        self.before_use: Callable[[torch.nn.Module], None] | None = None  # told of calls of modules; None during a step
        self.before_gather: weakref.WeakMethod[Callable[[], None]] | None = None  # told before another unit is gathered

    def take(self, owner: ParameterOwner) -> None:
        """Shard all parameters: `owner` keeps their values from now on."""
        for member, nothing in self._nothing.items():
            parameter = member.parameter
            self._managed[member] = managed(parameter) or ManagedParameter(parameter, ParameterState.SHARDED)
            self._managed[member].shard(owner, member.unit, nothing)
        self._of_unit = [[self._managed[member] for member in unit.members] for unit in self.units]
        self._nothing_of_unit = [[self._nothing[member] for member in unit.members] for unit in self.units]

    def member_of(self, parameter: torch.Tensor) -> Member:
        return self.members[id(parameter)]

    def is_gathered(self, member: Member) -> bool:
        return self._managed[member].state is ParameterState.GATHERED

    def copy_where_open(self, members: Iterable[Member]) -> None:
        """Show copies of these members while their units are open, so that views of them stay as they are."""
        for member in members:
            self._copied.setdefault(member.unit, set()).add(member)

    # --- One unit at a time ---

    def open(self, unit: int, *, exact: bool = False) -> None:
        """Show a unit's parameters. `exact`: those that ranks keep, even if gathers are encoded."""
        if unit in self.full:
            return
        require_stream(self._gpu, self._stream)
        exact = exact and self._gathers_codes
        if self.open_unit == unit and self._is_exact == exact:
            return
        self.require_there(self.units[unit].members[0])
        if self.before_gather is not None and (tell := self.before_gather()) is not None:
            tell()
        self.release_unit()
        acquire = self._core.acquire_exact_parameters if exact else self._core.acquire_parameters
        try:  # an interrupt may arrive when the core has acquired the unit
            with naming_unused_units():
                memory = acquire(unit)
            key = (unit, memory.address)
            members = self.units[unit].members
            if key not in self._views:
                with torch.inference_mode(False):  # they are used in training, too
                    tensors = views_in(memory, self.units[unit], self._begins[unit], members)
                    self._views[key] = GatheredViews(self.key, members, tensors)
            self.now = self._views[key]
            if unit in self._copied:
                with torch.inference_mode(False):
                    self.now = self.now.with_copies(self._copied[unit])
            self.open_unit, self._is_exact = unit, exact
            for each, view in zip(self._of_unit[unit], self.now.tensors):
                each.gather(view)
            self.casts.fill(unit, self.now.tensors)
        except BaseException:
            self._abandon_opening()
            raise

    def _abandon_opening(self) -> None:
        """Release the unit that was not opened to the end, if the core has acquired it."""
        if (unit := self.open_unit) is not None:  # torch sees some of its parameters
            for each, nothing in zip(self._of_unit[unit], self._nothing_of_unit[unit]):
                if each.state is ParameterState.GATHERED:
                    each.reshard(nothing, 0)
            self.casts.empty(unit)
        self._core.release()
        self.open_unit, self.now = None, NO_VIEWS

    def full_values(self, unit: int, number: int) -> torch.Tensor:
        """Return the values that a member of a unit shows in a block of gather()."""
        return plain(self.units[unit].members[number].parameter)

    def in_stream(self) -> AbstractContextManager[None]:
        """Work in the stream of the training inside the block, whichever is current."""
        return in_stream(self._gpu, self._stream)

    def require_there(self, member: Member) -> None:
        if self.is_gone:
            refuse_order(
                "cannot use a parameter: its optimizer is gone, and its values were partitioned over ranks",
                where=f"parameter {member.name}",
                needed="optimizer.close() on all ranks, before it is deleted",
            )
        if self.is_over:
            refuse_order(
                "cannot continue a backward pass: its parameters were partitioned anew or released",
                where=f"parameter {member.name}",
                needed="a forward pass after the optimizer was closed, or its state loaded",
            )

    def count_update(self) -> None:
        """Count the update of the last step."""
        self.updates += 1
        self._updated_at = self.updates

    def count_writes(self, written: Iterable[Member]) -> None:
        """Count a write to these members: graphs of before it may not use them."""
        self.updates += 1
        self._written_at.update(dict.fromkeys(written, self.updates))

    def counted_writes(self) -> list[Member]:
        """Return the full members that were written to since their block of gather() began, or have other memory. Torch does
        not count writes through `.data` to the same memory."""
        return [member for member in self._begun_full if self._is_written_now(member)]

    def _is_written_now(self, member: Member) -> bool:
        begun = self._begun_full.get(member)
        return begun is not None and begun != (member.parameter._version, member.parameter.data_ptr())

    def require_unchanged(self, unit: int, number: int, since: int) -> None:
        """Refuse to continue a backward pass with a member that was changed since the forward pass, when `updates` was
        `since`. A step changes no frozen ones."""
        member = self.units[unit].members[number]
        if member.group is not None and since < self._updated_at:
            refuse_order(
                "cannot continue a backward pass: its parameters were updated after its forward pass",
                where=f"parameter {member.name}",
                needed="all backward passes through a graph before step(), or another forward pass after it",
            )
        if self._is_written_now(member) or since < self._written_at.get(member, 0):
            refuse_order(
                "cannot continue a backward pass: its parameters were written to after its forward pass",
                where=f"parameter {member.name}",
                needed="all backward passes through a graph before the write, or another forward pass after it",
            )

    def release_unit(self) -> None:
        """Release the open unit, if there is one. Refuse writes to its parameters, because ranks keep none of them."""
        if written := self.close_unit():
            refuse_lost_writes(written)

    def close_unit(self) -> list[str]:
        """Release the open unit, and return the names of parameters that were written to."""
        written = self._written_through_views()
        if self.open_unit is None:
            if not self.is_over:
                self._core.release()  # an interrupt may have left a unit acquired
            return written
        unit = self.open_unit
        written += self._written(
            [
                (each, values)
                for each, nothing, address in zip(self._of_unit[unit], self._nothing_of_unit[unit], self.now.addresses)
                if (values := each.reshard(nothing, address)) is not None
            ]
        )
        if self._warns:
            self.now.warn_of_views(self._warned)
        self.now.forget_casts()
        self.casts.empty(unit)
        self._core.release()
        self.open_unit, self.now = None, NO_VIEWS
        return written

    def copy_of_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the same view of a copy if a tensor is a view of a member in the open unit's memory; None if it is not."""
        views = self.now
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or views.begin == views.end:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # of a transform of torch.func, which has no memory of its own
            return None
        place = views.place_of(tensor, address, self.updates) if views.begin <= address < views.end else None
        if place is None:
            return None
        member = self.units[place.unit].members[place.member]
        copy = (member.parameter if tensor.requires_grad else views.tensors[place.member]).clone()
        return copy.as_strided(place.size, place.stride, copy.storage_offset() + place.offset)

    def expect_no_writes(self, members: Iterable[Member]) -> None:
        """Notice writes through views of copies of these members, which are sharded again."""
        self._viewed |= {*members}

    def _written_through_views(self) -> list[str]:
        viewed, self._viewed = self._viewed, set()
        return [member.name for member in viewed if self._managed[member].take_write()]

    def _written(self, changed: Sequence[tuple[ManagedParameter, torch.Tensor]]) -> list[str]:
        """Return the names of the changed parameters of the open unit, each with its values, that were written in the unit's
        memory, or that are elsewhere and differ from it. Modules also assign casts and copies of the same values."""
        names = []
        for each, values in changed:
            assert self.open_unit is not None
            number = self._of_unit[self.open_unit].index(each)
            view = self.now.tensors[number]
            if values.data_ptr() == view.data_ptr() or not torch.equal(view.to(values), values):
                names.append(self.units[self.open_unit].members[number].name)
        return names

    # --- Copies of several units at the same time ---

    def copies_of(self, units: Iterable[int]) -> dict[Member, torch.Tensor]:
        """Return all values of these units. They are opened one after the other."""
        return {member: self.copy_out(member) for unit in units for member in self.opened(unit, exact=True)}

    def opened(self, unit: int, *, exact: bool = False) -> Sequence[Member]:
        self.open(unit, exact=exact)
        return self.units[unit].members

    def copy_out(self, member: Member) -> torch.Tensor:
        return self.now.tensors[member.tensor].clone()

    def show(self, member: Member, values: torch.Tensor) -> None:
        """Let torch see these values, until the parameter is resharded."""
        self.casts.forget()
        self._managed[member].gather(values, is_copy=True)

    def hold(self, units: Iterable[int], copies: Mapping[Member, torch.Tensor]) -> None:
        """Let torch see these copies of all parameters of the units, until the units are let go and the copies resharded."""
        for member, values in copies.items():
            self.show(member, values)
            self._begun_full[member] = member.parameter._version, values.data_ptr()
            self._full_places[storage_address(values.untyped_storage())] = member
        self.full |= set(units)

    def let_go(self, units: Iterable[int], copies: Mapping[Member, torch.Tensor]) -> None:
        """End what hold() began."""
        self.full -= set(units)
        for member, values in copies.items():
            del self._begun_full[member], self._full_places[storage_address(values.untyped_storage())]
        self.reshard(copies)

    def place_in_full(self, tensor: torch.Tensor) -> Place | None:
        """Return the place of a view of a parameter that a block of gather() shows; None if the tensor is none."""
        member = self._full_places.get(storage_address(tensor.untyped_storage())) if self._full_places else None
        if member is None or tensor.dtype is not member.parameter.dtype:
            return None
        whole = member.parameter
        if self._is_written_now(member):  # this graph has the written values; those of before the write may not continue
            self.count_writes([member])
            self._begun_full[member] = whole._version, whole.data_ptr()
        size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - whole.storage_offset()
        is_whole = offset == 0 and (size, stride) == (tuple(whole.shape), whole.stride())
        return Place(self.key, member.unit, member.tensor, size, stride, offset, is_whole, self.updates)

    def reshard(self, copies: Mapping[Member, torch.Tensor]) -> list[str]:
        """Shard the parameters that torch sees these copies of, and return the names of those that were written to."""
        written = []
        for member, values in copies.items():
            if self._managed[member].reshard(self._nothing[member], values.data_ptr()) is not None:
                written.append(member.name)
            if self.is_gone:  # inside a block of gather(), which ends now
                self._managed[member].lose()
        return written

    # --- While something else needs the device, and at the end ---

    def offload(self, owner: ParameterOwner) -> None:
        """Forget the memory that parameters were gathered into. No unit is open."""
        self.casts.forget()
        self._views, self.now = {}, NO_VIEWS
        for each in self._managed.values():
            each.offload(owner)

    def reload(self) -> None:
        """Let parameters be gathered again, if they were offloaded."""
        for each in self._managed.values():
            if each.state is ParameterState.OFFLOADED:
                each.reload()

    def are_collected(self) -> bool:
        """Return whether Python's collector is deleting the parameters: then no caller can use their values."""
        return all(each.is_collected for each in self._managed.values())

    def release_values(self) -> None:
        """Give all values to torch. All ranks do this together."""
        for number in range(len(self.units)):
            copies = [(member, self.copy_out(member)) for member in self.opened(number, exact=True)]
            self.release_unit()
            for member, values in copies:
                self._managed[member].release(values)

    def end(self, *, is_gone: bool) -> None:
        """Release the training's memory. If `is_gone`, the values are lost; else they are released, or another partition has
        them."""
        self.close_unit()
        self.is_gone, self.is_over = is_gone, True
        for each in self._managed.values() if is_gone else ():
            if each.state is not ParameterState.GATHERED:  # such a one is lost when its block of gather() ends
                each.lose()
        self.casts.forget()
        self._views, self.now = {}, NO_VIEWS
        del self._core
