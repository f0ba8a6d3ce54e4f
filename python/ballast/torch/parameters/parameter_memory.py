"""The memory in which torch sees the parameters. In stages 0 to 2 full parameters are in the library's memory, where torch sees
each update."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.errors import FailureError
from ballast.ranks import Group
from ballast.torch.parameters.managed_parameter import (
    OFF_DEVICE,
    Lifecycle,
    ManagedParameter,
    ParameterState,
    managed,
    refuse_access,
    refuse_lost,
    require_no_cast,
    require_same_kind,
)
from ballast.torch.parameters.overlapped_gathers import OverlappedGathers
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.parameters.unit_gather import GatherObserver
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, views_in
from ballast.torch.parameters.writes import Snapshot, is_elsewhere, is_same_kind, users_of

log = logging.getLogger("ballast")


class ParameterMemory:
    """The memory in which torch sees the parameters of a partition.

    Methods that are empty here concern one of the two kinds: memory with all parameters, which a user may write to at any time,
    or memory of one unit at a time (stage 3).
    """

    sees_writes = False  # whether writes are accepted later: at the step, or where something reads the state

    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> AbstractContextManager[None]:
        """Hold these parameters full inside the block, and keep writes to them."""
        raise NotImplementedError

    def after_step(self, result: _core.StepResult) -> None:
        """Let torch see the updated parameters, as soon as they are there."""
        raise NotImplementedError

    def after_load(self) -> None:
        """Let no graph use the parameters that were there before other values were loaded."""
        raise NotImplementedError

    def offload(self) -> None:
        """Offload the parameters, whose memory is freed."""
        raise NotImplementedError

    def reload(self) -> None:
        """Give parameters memory again, if they were offloaded."""
        raise NotImplementedError

    def release(self, together: bool, gathers: bool, keeps: bool) -> None:
        """Return the parameters to torch's memory, if all ranks do so together and gather them. Without `keeps` they lose
        their values."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until torch may read all parameters that it sees."""

    # --- Memory of one unit ---

    def release_unit(self) -> None:
        """Close the unit that is open: none may be open while gradients are acquired or state is read."""

    def on_module_call(self, module: torch.nn.Module) -> None:
        """Begin a call of a module whose own hook was registered too late for this call."""

    def tell_of_calls(self, tell: Callable[[torch.nn.Module], None] | None) -> None:
        """Call `tell` before a module uses its parameters, from now on."""

    def watch_gathers(self, observer: weakref.ref[GatherObserver]) -> None:
        """Tell it of gathers and calls from now on."""

    def require_offloadable(self, parameters: bool) -> None:
        """Refuse to leave parameters on the device that are gathered into memory which is freed."""

    def require_not_gathered(self, what: str) -> None:
        """Refuse an operation inside a block of gather(), where parameters are copies."""

    # --- Memory that a user writes to ---

    def writes(self) -> dict[UnitParameter, torch.Tensor]:
        """Return the parameters that were written to since the last update, each with its place in the library's memory."""
        return {}

    def require_acceptable_writes(self) -> None:
        """Refuse to overwrite memory that another tensor uses, as after a swap of `.data`."""

    def accept_writes(self) -> None:
        """Copy writes into the library's memory, if they are elsewhere."""

    def require_not_cast(self) -> None:
        """Refuse a model that was cast or moved after training began."""

    def undo_casts(self) -> None:
        """Put parameters back that a cast of the model has replaced before it was refused."""


class OffloadedParameters:
    """The owner of offloaded parameters. It refuses each use, and says what to do."""

    def __init__(self, members: Sequence[UnitParameter], managed: Sequence[ManagedParameter], group: Group):
        self.group = group
        self.lifecycle = Lifecycle.OPEN
        self._names = {id(member.parameter): member.name for member in members}
        for each in managed:
            each.offload(self)

    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> NoReturn:
        require_no_cast(operation, self._names[id(parameters[0])], why="training has begun, and it is off the device")
        self._refuse(self._names[id(parameters[0])])

    def begin(self) -> NoReturn:
        self._refuse(next(iter(self._names.values())))

    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> NoReturn:
        self._refuse(self._names[id(parameters[0])])

    def write(self, values: Mapping[torch.nn.Parameter, StoredTensor]) -> NoReturn:
        self.begin()

    def _refuse(self, name: str) -> NoReturn:
        if self.lifecycle is Lifecycle.LOST:
            refuse_lost(name, "which had its values")
        needed = "optimizer.reload(), on all ranks; or optimizer.offload(parameters=False) before"
        refuse_access(name, OFF_DEVICE, needed)


class FullParameters(ParameterMemory):
    """Stages 0 to 2: keeps each parameter in its place, and notices when a user writes to one or assigns other memory."""

    sees_writes = True

    def __init__(
        self,
        group: Group,
        core: _core.Training,
        units: Sequence[ParameterUnit],
        gathers: OverlappedGathers | None,
    ):
        self._group = group
        self._gathers = gathers
        self._core = core
        self._units = units
        self._members = [member for unit in units for member in unit.members]
        self._index = {id(member.parameter): number for number, member in enumerate(self._members)}
        self._managed = [
            managed(member.parameter) or ManagedParameter(member.parameter, ParameterState.FULL) for member in self._members
        ]
        self._watched: dict[int, Snapshot] = {}  # parameters of blocks of gather() since the last update
        self._open: Counter[int] = Counter()  # blocks that have not ended
        self._offloaded: OffloadedParameters | None = None
        self._take_places()

    def _take_places(self) -> None:
        self._watched = {}
        self._places = [
            view
            for number, unit in enumerate(self._units)
            for view in views_in(self._core.full_parameters(number), unit.members)
        ]
        self._users = [users_of(place) for place in self._places]
        self._versions = []
        for each, place in zip(self._managed, self._places):
            each.fill(place)
            self._versions.append(each.parameter._version)

    def after_step(self, result: _core.StepResult) -> None:
        if not result.skipped:
            self._count_write()
        if self._gathers is None or any(self._open.values()):
            self._core.finish()
        else:
            self._gathers.begin()
        self._watch_anew()

    def _count_write(self) -> None:
        """Let torch count an update as a write to each parameter: autograd refuses graphs of before it, which have saved the
        parameters."""
        self._versions = [version + 1 for version in self._versions]
        torch.autograd.graph.increment_version([member.parameter for member in self._members])

    def after_load(self) -> None:
        """Let torch count the load as a write to each parameter, which is none of the user's."""
        self._count_write()
        self._watch_anew()

    def finish(self) -> None:
        if self._gathers is not None:
            self._gathers.finish()

    def offload(self) -> None:
        self._offloaded = OffloadedParameters(self._members, self._managed, self._group)
        self._places, self._watched = [], {}

    def reload(self) -> None:
        if self._offloaded is not None:
            self._offloaded = None
            self._take_places()

    def release(self, together: bool, gathers: bool, keeps: bool) -> None:
        self._watched = {}
        try:
            if self._gathers is not None:
                self._gathers.end()
        except FailureError as error:  # this rank still returns its parameters
            if together:
                log.warning("the training had failed before its parameters were gathered: %s", error)
        if not keeps and self._offloaded is None:
            self.offload()
        if self._offloaded is not None:
            self._offloaded.lifecycle = Lifecycle.LOST
            for each in self._managed:
                each.lose()
            return
        for each, place in zip(self._managed, self._places):
            is_ours = not each.is_collected and each.parameter.data.data_ptr() == place.data_ptr()
            each.release(each.parameter.data.clone() if is_ours else None)

    # --- Writes of the user ---

    @contextmanager
    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> Iterator[None]:
        """Watch these parameters until the next update, which accepts all writes inside the block, also those that
        torch does not count. The ranks need not call it together."""
        self.finish()
        numbers = [self._index[id(each)] for each in dict.fromkeys(parameters) if id(each) in self._index]
        self._watch(number for number in numbers if number not in self._watched)
        self._open.update(numbers)
        try:
            yield
        finally:
            self._open.subtract(numbers)
            for number in numbers:
                if not self._is_place_shared(number):
                    self._put_back(number)

    def _watch(self, numbers: Iterable[int]) -> None:
        self._watched |= {number: Snapshot(self._members[number].parameter) for number in numbers}

    def _watch_anew(self) -> None:
        """Watch only the parameters of blocks that have not ended, beginning with their current values."""
        self._watched = {}
        self._watch(number for number, blocks in self._open.items() if blocks > 0)

    def writes(self) -> dict[UnitParameter, torch.Tensor]:
        self.finish()
        return {self._members[number]: place for number, place in enumerate(self._places) if self._is_written(number, place)}

    def _is_written(self, number: int, place: torch.Tensor) -> bool:
        parameter = self._members[number].parameter
        if parameter._version != self._versions[number] or is_elsewhere(parameter, place):
            return True
        return number in self._watched and self._watched[number].differs(parameter)

    def require_acceptable_writes(self) -> None:
        for number, (member, place) in enumerate(zip(self._members, self._places)):
            if is_elsewhere(member.parameter, place) and self._is_place_shared(number):
                refuse(
                    "cannot take over the tensor that was assigned to parameter.data: another tensor uses the parameter's "
                    "own memory, and would change with it",
                    where=f"parameter {member.name}",
                    needed="values that are copied under torch.no_grad(): parameter.copy_(values)",
                    remedy="To keep or swap values, clone() the parameter's first.",
                )

    def accept_writes(self) -> None:
        for number in range(len(self._places)):
            self._put_back(number)
            self._versions[number] = self._members[number].parameter._version
        self._watch_anew()

    def _put_back(self, number: int) -> None:
        parameter, place = self._members[number].parameter, self._places[number]
        if is_elsewhere(parameter, place) and is_same_kind(parameter, place):
            place.copy_(parameter.detach().clone())  # the assigned tensor may be a view of the place
            parameter.data = place

    def _is_place_shared(self, number: int) -> bool:
        """Return whether a tensor of the user shares the memory of a place that its parameter has left."""
        place, snapshot = self._places[number], self._watched.get(number)
        has_snapshot = snapshot is not None and not is_elsewhere(snapshot.values, place)
        return users_of(place) > self._users[number] + int(has_snapshot)

    def require_not_cast(self) -> None:
        for member, place in zip(self._members, self._places):
            require_same_kind(member.name, kept=place, found=member.parameter)

    def undo_casts(self) -> None:
        for member, place in zip(self._members, self._places):
            if not is_same_kind(member.parameter, place):
                member.parameter.data = place
