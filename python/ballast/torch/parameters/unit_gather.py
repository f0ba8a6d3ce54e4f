"""The unit whose parameters torch sees in stage 3: one at a time, because the next one uses the same memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from sys import getrefcount
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from ballast import _core
from ballast._torch_compat import (
    WeakStorage,
    references_to,
    storage_address,
    storage_of,
    swap_memory,
    users_of_storage,
    with_own_storage,
    without_modes,
)
from ballast.checks import fail, refuse_order
from ballast.errors import UsageError
from ballast.torch.gpu import in_stream, require_stream
from ballast.torch.parameters.managed_parameter import (
    Lifecycle,
    ManagedParameter,
    ParameterOwner,
    ParameterState,
    forget_graphs_of,
    managed,
    nothing_like,
    plain,
    refuse_lost,
)
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, views_in
from ballast.torch.parameters.writes import refuse_lost_writes, users_of

log = logging.getLogger("ballast")

_MOST_PLACES = 1000  # remembered places: slices of changing sizes would add up


class Place(NamedTuple):
    """The place of a view of a parameter, or of a cast of it."""

    key: object  # the key of the gatherer whose unit it is: each optimizer of a model has one
    unit: int
    member: int  # the member's number in the unit
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the first of the member or of its cast
    is_whole: bool  # it is the parameter as it is
    cast: torch.dtype | None  # it is a view of the parameter's cast to this format
    updates: int  # the updates that the gatherer had counted


class GatheredViews:
    """The views, the places in them, and whether tensors other than these views share the memory. In the place of some views
    there are copies, whose memory keeps its values. So tensors that share it may stay."""

    def __init__(
        self,
        key: object,
        members: Sequence[UnitParameter],
        tensors: Sequence[torch.Tensor],
        copies: Collection[UnitParameter] = (),
    ):
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self._key = key
        self._members = members
        views = [(member, tensor) for member, tensor in zip(members, tensors) if member not in copies]
        storages = [(member, storage_address(tensor.untyped_storage())) for member, tensor in views]
        # Users are counted while only these tensors exist.
        self._users = [(member, storage, users_of_storage(storage)) for member, storage in storages]
        self._places: dict[tuple[object, ...], Place] = {}  # places that were found before
        self.casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # casts by member, until the unit is released
        self.has_copies = bool(copies)
        self.dtype = tensors[0].dtype if tensors else None
        filled = [tensor for _, tensor in views if tensor.numel() > 0]
        self.begin = min((tensor.data_ptr() for tensor in filled), default=0)  # addresses
        self.end = max((tensor.data_ptr() + tensor.nbytes for tensor in filled), default=0)

    def with_copies(self, copies: Collection[UnitParameter]) -> GatheredViews:
        """Return these views, with copies of some members as they are now."""
        tensors = [tensor.clone() if member in copies else tensor for member, tensor in zip(self._members, self.tensors)]
        return GatheredViews(self._key, self._members, tensors, copies)

    def place_of(self, tensor: torch.Tensor, address: int, updates: int) -> Place | None:
        """Return the place of a tensor whose first element is at this address; None if it is no view of a member. `updates` is
        their number now."""
        key = (address, tensor.shape, tensor.stride(), tensor.dtype)
        place = self._places.get(key)
        if place is None:
            place = self._find(tensor, address, updates)
            if place is not None:
                if len(self._places) >= _MOST_PLACES:
                    self._places.clear()
                self._places[key] = place
        elif place.updates != updates:
            place = self._places[key] = Place(*place[:-1], updates)
        return place

    def _find(self, tensor: torch.Tensor, address: int, updates: int) -> Place | None:
        for number, (member, view) in enumerate(zip(self._members, self.tensors)):
            offset = address - view.data_ptr()
            if 0 <= offset < view.nbytes and tensor.dtype == view.dtype:
                size, stride = tuple(tensor.shape), tensor.stride()
                is_whole = offset == 0 and (size, stride) == (tuple(view.shape), view.stride())
                offset //= view.element_size()
                return Place(self._key, member.unit, number, size, stride, offset, is_whole, None, updates)
        return None

    def cast_of(self, member: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a cast of a member. It is made once while the unit is open."""
        cast = self.casts.get((member, dtype))
        if cast is None:
            cast = self.casts[member, dtype] = self.tensors[member].to(dtype)
        return cast

    def outlived(self) -> list[tuple[UnitParameter, torch.UntypedStorage]]:
        """Return the members whose memory other tensors than these views have, with the storages of these tensors."""
        found = []
        for member, storage, users in self._users:
            if users_of_storage(storage) > users:
                found.append((member, self.tensors[member.tensor].untyped_storage()))
        return found


NO_VIEWS = GatheredViews(None, (), ())


class CachedCasts:
    """The casts of one training. No other tensor than a cached cast loses its memory: a cast that anything else refers to is
    left alone."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, torch.Tensor]] = []  # casts of the open unit: the number of the member, and the cast
        self.are_evaluated = False  # the call of the model that began last is in torch.no_grad()
        self._emptied: dict[int, list[tuple[int, torch.Tensor]]] = {}  # emptied casts, by unit

    def add(self, member: int, cast: torch.Tensor) -> None:
        """Note a cast of a member of the open unit, which may be in the cache. Inside of an operator torch does not tell
        whether it is."""
        if torch.is_autocast_cache_enabled() and all(cast is not other for _, other in self._seen):
            self._seen.append((member, cast))

    def fill(self, unit: int, values: Sequence[torch.Tensor]) -> None:
        """Give the casts of a unit that opens their values again, if the cache still has them."""
        for member, cast in self._emptied.pop(unit, ()):
            if references_to(cast) > 1:
                cast.untyped_storage().resize_(cast.nbytes)
                cast.data.copy_(values[member])  # autograd does not count this write
                self._seen.append((member, cast))

    def empty(self, unit: int) -> None:
        """Free the memory of the casts of a unit that is released: of those to which only the cache and this object refer.
        An evaluation has no gradients, so its casts need not be the same ones later."""
        if self.are_evaluated and not torch.is_grad_enabled():
            torch.clear_autocast_cache()
        seen, self._seen = self._seen, []
        while seen:
            member, cast = seen.pop()
            is_only_cached = references_to(cast) == 2 and getrefcount(cast) == _references_of_a_variable()
            if is_only_cached and users_of(cast) == _users_of_own_storage():
                cast.untyped_storage().resize_(0)
                self._emptied.setdefault(unit, []).append((member, cast))

    def forget(self) -> None:
        """Forget all casts, in the cache too: parameters are about to be used without their units being opened."""
        if any(references_to(cast) > 1 for casts in self._emptied.values() for _, cast in casts):
            torch.clear_autocast_cache()
        self._seen, self._emptied = [], {}


# Versions of Python and torch count differently, so these are measured.


@cache
def _references_of_a_variable() -> int:
    """Return the references in Python to a tensor that is in one variable and in one place in torch."""
    holder, tensor = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    holder.grad = tensor
    return getrefcount(tensor)


@cache
def _users_of_own_storage() -> int:
    """Return the users of a storage that only one tensor has."""
    return users_of(torch.zeros(1, device="cpu"))


class GatherObserver(Protocol):
    """The partition whose units are gathered."""

    def before_gather(self, unit: int, exact: bool) -> None:
        """Another unit than the open one is about to be gathered."""

    def after_call(self) -> None:
        """No module is called any more."""


class UnitGather:
    """Opens units, and releases the open one. Parameters can also be copied out: such copies stay until they are
    resharded.

    Parameters may outlive the training. After its end no unit can be opened.
    """

    def __init__(self, core: _core.Training, units: Sequence[ParameterUnit], options: _core.TrainingOptions, *, warns: bool):
        self.core = core
        self.key = object()  # the key of places in these units
        self._gathers_codes = core.gathers_codes
        self._gpu, self._stream = options.gpu, options.stream
        self._warns = warns  # one rank warns of views that outlive their parameter
        self._views: dict[tuple[int, int], GatheredViews] = {}  # views by unit and address
        self._copied: dict[int, set[UnitParameter]] = {}  # by unit, members whose views may outlive its opening
        self._warned: set[UnitParameter] = set()  # members whose views were named in a warning
        self.members = {id(member.parameter): member for unit in units for member in unit.members}  # members by id of parameter
        self._nothing = {member: nothing_like(member.parameter, member.parameter.device) for member in self.members.values()}
        self._managed: dict[UnitParameter, ManagedParameter] = {}
        self._unit_managed: list[list[ManagedParameter]] = []  # each list in the order of the unit's members
        self._nothing_of_unit: list[list[torch.Tensor]] = []
        self.units = units
        self.updates = 0  # counts updates of all parameters that are trained, and writes to any
        self._updated_at = 0  # `updates` after the last update by a step
        self._written_at: dict[UnitParameter, int] = {}  # `updates` after the last write
        self._begun_full: dict[UnitParameter, tuple[int, int]] = {}  # the count of writes and the address when a block began
        self._full_places: dict[int, UnitParameter] = {}  # members by address of the memory that a block of gather() shows
        self._viewed: set[UnitParameter] = set()  # members of which copies may have views, since the last release
        self.now = NO_VIEWS  # the open unit's views
        self.casts = CachedCasts()
        self.open_unit: int | None = None
        self._may_be_acquired = False  # the core has acquired a unit, which an interrupt may have kept from being opened
        # Whether the open unit has the parameters that ranks keep, although gathers are encoded; None: it is being closed.
        self._is_exact: bool | None = None
        self._is_hidden = False  # whether the open unit's parameters are sharded in the eyes of torch
        self._lent: list[Any] = []  # weak storages of lend() in the open unit's memory
        self.full: set[int] = set()  # units that a block of gather() holds full
        self.lifecycle = Lifecycle.OPEN
        self.on_call_between_steps: Callable[[torch.nn.Module], None] | None = None  # told of calls of modules
        self.observer: weakref.ref[GatherObserver] | None = None

    def take(self, owner: ParameterOwner) -> None:
        """Shard all parameters: `owner` keeps their values from now on."""
        for member in self._nothing:
            forget_graphs_of(member.parameter)
        for member, nothing in self._nothing.items():
            parameter = member.parameter
            self._managed[member] = managed(parameter) or ManagedParameter(parameter, ParameterState.SHARDED)
            self._managed[member].shard(owner, member.unit, nothing)
        self._unit_managed = [[self._managed[member] for member in unit.members] for unit in self.units]
        self._nothing_of_unit = [[self._nothing[member] for member in unit.members] for unit in self.units]

    def member_of(self, parameter: torch.Tensor) -> UnitParameter:
        return self.members[id(parameter)]

    def is_gathered(self, member: UnitParameter) -> bool:
        return self._managed[member].state is ParameterState.GATHERED

    def copy_where_open(self, members: Iterable[UnitParameter]) -> None:
        """Show copies of these members while their units are open, so that views of them stay as they are."""
        for member in members:
            self._copied.setdefault(member.unit, set()).add(member)

    # --- One unit at a time ---

    def open(self, unit: int, *, exact: bool = False) -> None:
        """Show a unit's parameters. `exact`: those that ranks keep, even if gathers are encoded."""
        if unit in self.full:
            return
        if self._gpu is not None:
            require_stream(self._gpu, self._stream)
        exact = exact and self._gathers_codes
        if self.open_unit == unit and self._is_exact == exact:
            if self._is_hidden:
                self._is_exact = None  # an interrupt may arrive before it is shown
                self._show(unit)
                self._is_exact = exact
            return
        if self.lifecycle is not Lifecycle.OPEN:
            self.require_there(self.units[unit].members[0])
        if self.observer is not None and (observer := self.observer()) is not None:
            observer.before_gather(unit, exact)
        self.release_unit()
        acquire = self.core.acquire_exact_parameters if exact else self.core.acquire_parameters
        self._may_be_acquired = True
        try:  # an interrupt may arrive when the core has acquired the unit
            memory = acquire(unit)
            key = (unit, memory.address)
            members = self.units[unit].members
            if key not in self._views:
                with torch.inference_mode(False), without_modes():  # they are used in training, too, and are no part of it
                    tensors = views_in(memory, members)
                    self._views[key] = GatheredViews(self.key, members, tensors)
            self.now = self._views[key]
            if unit in self._copied:
                with torch.inference_mode(False), without_modes():
                    self.now = self.now.with_copies(self._copied[unit])
            self.open_unit, self._is_exact = unit, exact
            self._show(unit)
            self.casts.fill(unit, self.now.tensors)
        except BaseException as error:
            self._abandon_opening()
            name_different_uses(error)
            raise

    def _show(self, unit: int) -> None:
        self._is_hidden = False
        for each, view in zip(self._unit_managed[unit], self.now.tensors):
            each.gather(view)

    def _abandon_opening(self) -> None:
        """Release the unit that was not opened to the end, if the core has acquired it."""
        if (unit := self.open_unit) is not None:  # torch sees some of its parameters
            for each, nothing in zip(self._unit_managed[unit], self._nothing_of_unit[unit]):
                if each.state is ParameterState.GATHERED:
                    each.reshard(nothing, 0)
            self.casts.empty(unit)
        self._release()

    def _release(self) -> None:
        self.core.release()
        self.open_unit, self.now, self._may_be_acquired = None, NO_VIEWS, False

    def full_values(self, unit: int, number: int) -> torch.Tensor:
        """Return the values that a member of a unit shows in a block of gather()."""
        return plain(self.units[unit].members[number].parameter)

    def in_stream(self) -> AbstractContextManager[None]:
        """Work in the stream of the training inside the block, whichever is current."""
        return in_stream(self._gpu, self._stream)

    def require_there(self, member: UnitParameter) -> None:
        if self.lifecycle is Lifecycle.LOST:
            refuse_lost(member.name, "and its values were partitioned over ranks")
        if self.lifecycle is Lifecycle.CLOSED:
            needed = "a forward pass after the optimizer was closed, or its state loaded"
            refuse_backward(member, "partitioned anew or released", needed)

    def count_update(self) -> None:
        """Count the update of the last step."""
        self.updates += 1
        self._updated_at = self.updates

    def count_writes(self, written: Iterable[UnitParameter]) -> None:
        """Count a write to these members: graphs of before it may not use them."""
        self.updates += 1
        self._written_at.update(dict.fromkeys(written, self.updates))

    def counted_writes(self) -> list[UnitParameter]:
        """Return the full members that were written to since their block of gather() began, or have other memory. Torch does
        not count writes through `.data` to the same memory."""
        return [member for member in self._begun_full if self._is_written_now(member)]

    def _is_written_now(self, member: UnitParameter) -> bool:
        begun = self._begun_full.get(member)
        return begun is not None and begun != (member.parameter._version, member.parameter.data_ptr())

    def require_unchanged(self, unit: int, number: int, since: int) -> None:
        """Refuse to continue a backward pass with a member that was changed since the forward pass, when `updates` was
        `since`. A step changes no frozen ones."""
        member = self.units[unit].members[number]
        if member.group is not None and since < self._updated_at:
            needed = "all backward passes through a graph before step(), or another forward pass after it"
            refuse_backward(member, "updated after its forward pass", needed)
        if self._is_written_now(member) or since < self._written_at.get(member, 0):
            needed = "all backward passes through a graph before the write, or another forward pass after it"
            refuse_backward(member, "written to after its forward pass", needed)

    def release_unit(self) -> None:
        """Release the open unit, if there is one. Refuse writes to its parameters, because ranks keep none of them."""
        if written := self.close_unit():
            refuse_lost_writes(written)

    def hide_unit(self) -> None:
        """Let torch see nothing of the open unit, if there is one. Its memory stays as it is until another unit is opened."""
        if self.open_unit is not None and not self._is_hidden and (written := self.close_unit(hides=True)):
            refuse_lost_writes(written)

    def close_unit(self, *, hides: bool = False) -> list[str]:
        """Release the open unit, or only hide it, and return the names of parameters that were written to."""
        written = self._written_through_views() if self._viewed and not hides else []
        if self.open_unit is None:
            if self._may_be_acquired and self.lifecycle is Lifecycle.OPEN:
                self._release()
            return written
        unit, exact, self._is_exact = self.open_unit, self._is_exact, None  # an interrupt may arrive before it is closed
        if not self._is_hidden:
            changed = []
            for each, nothing, address in zip(self._unit_managed[unit], self._nothing_of_unit[unit], self.now.addresses):
                if (values := each.reshard(nothing, address)) is not None:
                    changed.append((each, values))
            self._is_hidden = True
            if changed:
                written += self._written(changed)
        if hides:
            self._is_exact = exact
            return written
        if self._lent:
            self._move_lent()
        if outlived := self.now.outlived():
            self._keep_views(unit, outlived)
        self.now.casts.clear()
        self.casts.empty(unit)
        self._release()
        return written

    def lend(self, number: int) -> torch.Tensor:
        """Return values of a member of the open unit that stay as they are. They are copied only if the unit is released
        while a tensor still has their memory."""
        with torch.inference_mode(False), without_modes():
            if swap_memory is None:
                return self.now.tensors[number].clone()
            lent = with_own_storage(self.now.tensors[number])
        self._lent.append(WeakStorage(lent.untyped_storage()))
        return lent

    def _move_lent(self) -> None:
        while self._lent:  # an interrupt may arrive
            if (storage := storage_of(self._lent[-1])) is not None:
                move(storage)
            self._lent.pop()

    def _keep_views(self, unit: int, outlived: Iterable[tuple[UnitParameter, torch.UntypedStorage]]) -> None:
        """Give views that outlive the release of their parameter memory of their own, and warn of them: in a torch that cannot,
        they show the values of other units from then on. It is no error, because they may be unused. Each parameter is named
        once."""
        for member, storage in outlived:
            if swap_memory is not None:
                move(storage)
                self._views = {key: views for key, views in self._views.items() if key[0] != unit}
            if self._warns and member not in self._warned:
                self._warned.add(member)
                log.warning(
                    "a view of parameter %s is still there after its module was released: from now on it %s. Take it from the "
                    "parameter (weight.t()) where it is used, and drop it after that. If a torch.autograd.Function or a "
                    "checkpointed function keeps it: use ctx.save_for_backward(), or give it to the function as an argument.",
                    member.name,
                    "shows the values of other modules" if swap_memory is None else "has a copy of the values",
                )

    def copy_of_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the same view of a copy if a tensor is a view of a member in the open unit's memory; None if it is not."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a sparse tensor, or one of a transform of torch.func, has no memory of its own
            return None
        views = self.now
        if not views.begin <= address < views.end:
            return None
        place = views.place_of(tensor, address, self.updates)
        if place is None:
            return None
        member = self.units[place.unit].members[place.member]
        copy = (member.parameter if tensor.requires_grad else views.tensors[place.member]).clone()
        return copy.as_strided(place.size, place.stride, copy.storage_offset() + place.offset)

    def expect_no_writes(self, members: Iterable[UnitParameter]) -> None:
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
            number = self._unit_managed[self.open_unit].index(each)
            view = self.now.tensors[number]
            if values.data_ptr() == view.data_ptr() or not torch.equal(view.to(values), values):
                names.append(self.units[self.open_unit].members[number].name)
        return names

    # --- Copies of several units at the same time ---

    def copies_of(self, units: Iterable[int]) -> dict[UnitParameter, torch.Tensor]:
        """Return all values of these units. They are opened one after the other."""
        return {member: self.copy_out(member) for unit in units for member in self.opened(unit, exact=True)}

    def opened(self, unit: int, *, exact: bool = False) -> Sequence[UnitParameter]:
        self.open(unit, exact=exact)
        return self.units[unit].members

    def copy_out(self, member: UnitParameter) -> torch.Tensor:
        with without_modes():
            return self.now.tensors[member.tensor].clone()

    def show(self, member: UnitParameter, values: torch.Tensor) -> None:
        """Let torch see these values, until the parameter is resharded."""
        self.casts.forget()
        self._managed[member].gather(values, is_copy=True)

    def hold(self, units: Iterable[int], copies: Mapping[UnitParameter, torch.Tensor]) -> None:
        """Let torch see these copies of all parameters of the units, until the units are let go and the copies resharded."""
        for member, values in copies.items():
            self.show(member, values)
            self._begun_full[member] = member.parameter._version, values.data_ptr()
            self._full_places[storage_address(values.untyped_storage())] = member
        self.full |= set(units)

    def let_go(self, units: Iterable[int], copies: Mapping[UnitParameter, torch.Tensor]) -> None:
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
        return Place(self.key, member.unit, member.tensor, size, stride, offset, is_whole, None, self.updates)

    def reshard(self, copies: Mapping[UnitParameter, torch.Tensor]) -> list[str]:
        """Shard the parameters that torch sees these copies of, and return the names of those that were written to."""
        written = []
        for member, values in copies.items():
            if self._managed[member].reshard(self._nothing[member], values.data_ptr()) is not None:
                written.append(member.name)
            if self.lifecycle is Lifecycle.LOST:  # training was lost inside a block of gather(), which ends now
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

    @property
    def is_offloaded(self) -> bool:
        return any(each.state is ParameterState.OFFLOADED for each in self._managed.values())

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

    def end(self, lifecycle: Lifecycle) -> None:
        """Release the training's memory. The values are LOST; or they are released, or another partition has them."""
        self.close_unit()
        self.lifecycle = lifecycle
        for each in self._managed.values() if lifecycle is Lifecycle.LOST else ():
            if each.state is not ParameterState.GATHERED:  # such a one is lost when its block of gather() ends
                each.lose()
        self.casts.forget()
        self._views, self.now = {}, NO_VIEWS
        del self.core


def move(storage: torch.UntypedStorage) -> None:
    """Give the tensors of a storage memory of their own, with the same values."""
    assert swap_memory is not None
    with without_modes():
        swap_memory(storage, storage.clone())


def refuse_backward(member: UnitParameter, changed: str, needed: str) -> NoReturn:
    what = f"cannot continue a backward pass: its parameters were {changed}"
    refuse_order(what, where=f"parameter {member.name}", needed=needed)


def name_different_uses(met: BaseException) -> None:
    """Say what to do about units that only some ranks use, if this is the error of ranks that do not gather or reduce one
    together."""
    names = {"B1003": "wrong_size", "B1007": "out_of_order"}
    if not isinstance(met, UsageError) or met.code not in names or "rank" not in met.what_happened:
        return
    remedy = (
        "Make the same calls with the same sizes, in the same order, on all ranks. If ranks may use different parts of the "
        "model, as with experts that have no tokens on some ranks, or layers that each rank drops at random: "
        "ballast.Tuning(calls_differ=True)."
    )
    try:
        fail(names[met.code], met.what_happened, where=met.where, needed=met.needed, available=met.available, remedy=remedy)
    except UsageError as named:
        raise named from None  # one error is enough to see
