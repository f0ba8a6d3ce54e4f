"""The parameters of an optimizer and their state in a training of the library: read and changed between steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.connecting import Group
from ballast.torch.collectives import agree_on_memory
from ballast.torch.gpu import in_stream, require_stream, return_cached_memory
from ballast.torch.memory import KeptMemory
from ballast.torch.parameters.deferred_parameters import InitialValueReader, refuse_to_begin
from ballast.torch.parameters.managed_parameter import is_without_values, lacks_values
from ballast.torch.parameters.placeholder import nothing_like
from ballast.torch.parameters.units import Member, UnitOfMembers, model_of
from ballast.torch.parameters.writes import agree_on_writes, is_same_kind, require_same_values
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.updates.rules import Rule

log = logging.getLogger("ballast")


class Residence(Protocol):
    """The memory in which torch sees the parameters."""

    sees_writes: bool  # whether writes are accepted later: at the step, or where something reads the state

    def release_unit(self) -> None: ...  # no unit may be open while gradients are acquired or state is read
    def after_step(self, *, updated: bool) -> None: ...
    def after_load(self) -> None: ...  # of other values of parameters, between steps
    def finish(self) -> None: ...  # wait until torch may read all parameters that it sees
    def enter(self, module: torch.nn.Module) -> None: ...
    def before_uses(self, tell: Callable[[torch.nn.Module], None] | None) -> None: ...
    def watch_gathers(
        self, before: weakref.WeakMethod[Callable[[int, bool], None]], after_call: weakref.WeakMethod[Callable[[], None]]
    ) -> None: ...  # called before another unit is gathered, and after a call of a module
    def release(self, together: bool, gathers: bool) -> None: ...
    def gathered(self, parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[None]: ...
    def writes(self) -> dict[Member, torch.Tensor]: ...
    def require_acceptable_writes(self) -> None: ...
    def accept_writes(self) -> None: ...
    def require_not_cast(self) -> None: ...
    def undo_casts(self) -> None: ...  # after a cast of the model was refused
    def require_offloadable(self, parameters: bool) -> None: ...
    def require_not_gathered(self, what: str) -> None: ...
    def offload(self) -> None: ...
    def reload(self) -> None: ...


Moments = Mapping[tuple[int, _core.Moment], torch.Tensor]  # by id of the parameter: in fp32, of the full parameter


class ShardedState:
    """This rank's shards. It is made when the parameters are on the device where they stay."""

    def __init__(
        self,
        units: list[UnitOfMembers],
        ranks: ProcessGroups,
        rules: Sequence[Rule],
        options: _core.TrainingOptions,
        reside: Callable[[_core.Training, list[UnitOfMembers]], Residence],
    ):
        self._units = units
        self._group = ranks.of_data
        self._members = [member for unit in units for member in unit.trained]
        self._index = {id(member.parameter): number for number, member in enumerate(self._members)}
        self._gpu, self._stream = options.gpu, options.stream
        self.keeps_run = bool(options.run)
        self.stage = options.stage
        return_cached_memory(self._gpu)
        self._core = _core.Training(
            model=model_of(units),
            group=ranks.of_data._core,
            norm_group=None if ranks.of_model is None else ranks.of_model._core,
            rules=rules,
            options=options,
        )
        self._pass_on_log()
        if self._core.unpinned_because:
            log.warning("host memory could not be pinned, so copies of it are slower: %s", self._core.unpinned_because)
        self.unused: set[Member] = set()  # members that this step leaves as they are: no rank has a gradient
        self._freed = 0  # units whose parameters have no memory of torch any more
        self._start()
        self._kept_memory = KeptMemory() if self._gpu is None else None
        return_cached_memory(self._gpu)
        self._residence = reside(self._core, units)
        self._begins = [self._core.tensor_begins(unit) for unit in range(len(units))]
        self._is_shared = options.stage > 0 and self._group.size > 1  # each rank has a shard of the state
        self._update_is_elsewhere = _keeps_copies(options, units)

    def _pass_on_log(self) -> None:
        """Pass the library's log on to Python's logger."""
        for level, line in self._core.take_log():
            log.log(level, "%s", line)

    def _start(self) -> None:
        """Copy parameters unit by unit, and free torch's memory of each: no rank holds all parameters twice."""
        members = [member for unit in self._units for member in unit.members]
        for member in members:
            is_kept = self._core.found and member.group is not None
            if not is_kept and lacks_values(member.parameter):
                refuse_to_begin(member.name)
        if not self._core.found:
            there = [member for member in members if not is_without_values(member.parameter)]
            require_same_values(self._group, there, "cannot begin to train")
        values = InitialValueReader()

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            self._free(unit)
            member = self._units[unit].members[tensor]
            values.read(member.parameter, *member.of_parameter(first, count), into)
            return True

        self._core.start(fill)
        self._free(len(self._units))

    def _free(self, units: int) -> None:
        """Free torch's memory of the parameters of this many units."""
        for unit in self._units[self._freed : units]:
            for member in unit.members:
                with without_torch_function():  # it may be without values already
                    member.parameter.data = nothing_like(member.parameter, member.parameter.device)
        self._freed = max(self._freed, units)

    def _acquire_gradients(self, unit: int) -> _core.Memory:
        require_stream(self._gpu, self._stream)
        memory = self._core.acquire_gradients(unit)
        if self._kept_memory is not None:
            self._kept_memory.count(memory.bytes)
        return memory

    @property
    def steps(self) -> int:
        return self._core.steps

    @property
    def lost(self) -> tuple[str, int] | None:
        """Why a run has begun again, and the newest step that it had."""
        return self._core.lost

    @property
    def found(self) -> bool:
        """Whether a run was resumed."""
        return self._core.found

    @property
    def note(self) -> bytes:
        """The optimizer's bytes in the next commits of state on drives; those of the resumed commit, until they are set."""
        return self._core.note()

    def set_note(self, note: bytes) -> None:
        """Set the bytes of the next commits."""
        self._core.set_note(note)

    def wait_for_commit(self) -> None:
        """Wait until the last step is committed."""
        self._core.wait_for_commit()

    @property
    def committed(self) -> _core.RunPoint:
        """The last commit of the run."""
        return self._core.committed

    def set_round(self, joint_round: _core.JointRound) -> None:
        """Set the round of joint runs that the next commits belong to."""
        self._core.set_round(joint_round)

    def trains(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._index

    def parts(self, parameter: torch.Tensor) -> list[tuple[int, int]]:
        """Return the elements whose state this rank keeps: ranges of first and count."""
        member = self._members[self._index[id(parameter)]]
        return self._core.parts(member.unit, member.tensor)

    def part(self, member: Member) -> tuple[int, int]:
        """Return parts() as one range. Of a frozen parameter, return the range of its values."""
        parts = self._core.parts(member.unit, member.tensor)
        return parts[0] if parts else (0, 0)  # a shard is one range, and so is its part of a parameter

    def in_tile(self, tile: _core.TileToUpdate) -> Iterator[tuple[Member, int, int]]:
        """Yield the members that the step updates with elements in a tile, where these begin in the tile, and how many there
        are."""
        for member in self._units[tile.unit].trained:
            if member in self.unused:
                continue
            begin, count = self.part(member)
            before = self._begins[tile.unit][member.tensor] - tile.first  # of the parameter's first element, in the tile
            first, end = max(begin, -before), min(begin + count, tile.count - before)
            if first < end:
                yield member, before + first, end - first

    def read_moment(self, parameter: torch.Tensor, moment: _core.Moment) -> torch.Tensor:
        """Return the moment of the full parameter, with zeros where other ranks keep it."""
        member = self._members[self._index[id(parameter)]]
        self._residence.release_unit()
        full = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
        self._core.read_moment(member.unit, member.tensor, moment, into=full.data_ptr())
        return full

    @property
    def sharing(self) -> Group | None:
        """The ranks that each keep a shard of the state; None if this rank keeps all of it."""
        return self._group if self._is_shared else None

    def gathered(self, parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Keep all writes to these parameters inside the block."""
        return self._residence.gathered(parameters)

    def writes(self, *, with_casts: bool) -> dict[Member, torch.Tensor]:
        """Return the parameters that were written to, each with its place. Those that were cast have none to go to, and are
        refused where a step needs them."""
        found = self._residence.writes()
        return found if with_casts else {each: place for each, place in found.items() if is_same_kind(each.parameter, place)}

    def accept_writes(self, *, with_casts: bool = True) -> None:
        """Accept writes to parameters that any rank has made since the last step. All ranks call it together."""
        if not self._residence.sees_writes:
            return
        writes = self.writes(with_casts=with_casts)
        [written] = self._group.all_reduce([len(writes)])
        if written > 0:
            self._take_over(writes)

    def _take_over(self, writes: Mapping[Member, torch.Tensor]) -> None:
        """Take over the written parameters. All ranks call it together, if one rank has written."""
        before = {member: writes.get(member, member.parameter.data) for member in self._members}
        written = agree_on_writes(self._group, before, writes, self._residence.require_acceptable_writes)
        self._residence.accept_writes()
        if self._update_is_elsewhere:
            self._core.take_full_parameters({(member.unit, member.tensor) for member in written})
        else:
            self._core.parameters_changed()

    def set_steps(self, steps: int) -> None:
        """Continue after this step. Call it before state is written: drives commit it as of this step."""
        self._core.set_steps(steps)

    def write_moments(self, moments: Moments) -> None:
        """Write moments, and zeros where there are none. All ranks call it together."""

        def address_of(unit: int, tensor: int, moment: _core.Moment) -> int:
            found = moments.get((id(self._units[unit].members[tensor].parameter), moment))
            return 0 if found is None else found.data_ptr()

        self._residence.release_unit()
        self._core.write_moments(address_of)

    def require_not_gathered(self, what: str) -> None:
        """Refuse an operation while parameters are gathered in torch's memory."""
        self._residence.require_not_gathered(what)

    def require_not_cast(self) -> None:
        """Refuse a model that was cast or moved after training began."""
        self._residence.require_not_cast()

    # --- While something else needs the device ---

    def offload(self, parameters: bool) -> None:
        """Free the device's memory, with or without that of the parameters. All ranks call it together."""
        self._residence.require_offloadable(parameters)
        self.require_not_gathered("cannot offload the training")
        self._residence.release_unit()
        self._core.offload(parameters=parameters, agree=agree_on_memory(self._group, "offload()"))
        if parameters:
            self._residence.offload()

    def reload(self) -> None:
        """Bring everything back. Any stream may be current, because close() reloads a training that is offloaded."""
        with in_stream(self._gpu, self._stream):
            return_cached_memory(self._gpu)
            self._core.reload(agree=agree_on_memory(self._group, "reload()"))
            self._residence.reload()

    # --- Checkpoints ---

    def local_shards(self) -> list[_core.StatePart]:
        """Return the shards that this rank keeps, in the order in which they are read."""
        return self._core.local_shards()

    def member_of(self, part: _core.StatePart) -> Member:
        return self._units[part.unit].members[part.tensor]

    def kind(self, member: Member) -> _core.ChunkKind:
        return self._core.kind(member.unit)

    def visit_shards(self, visit: Callable[[_core.StatePart], None]) -> None:
        """Read the shards one by one. All ranks call it together, because parameters may have been written to."""
        require_stream(self._gpu, self._stream)
        self.accept_writes()
        self._residence.release_unit()
        self._core.visit_shards(visit)

    def change_shards(self, change: Callable[[_core.StatePart], None], steps: int, agree: Callable[[], None]) -> None:
        """Change the shards one by one, and call `agree` before drives commit them as of this number of steps. All
        ranks call it together. No graph of before can use the parameters any more."""
        self._replace_shards(change, steps, agree)
        self._residence.after_load()

    def move_shards(self, change: Callable[[_core.StatePart], None]) -> None:
        """Change the shards one by one to those of the same values in another training. All ranks call it together."""
        self._replace_shards(change, self.steps, lambda: None)

    def _replace_shards(self, change: Callable[[_core.StatePart], None], steps: int, agree: Callable[[], None]) -> None:
        def agreed() -> None:
            agree()
            self._core.set_steps(steps)

        require_stream(self._gpu, self._stream)
        self._residence.release_unit()
        self._core.change_shards(change, agreed)

    @property
    def members(self) -> Sequence[Member]:
        """The members that are trained."""
        return self._members

    @property
    def all_members(self) -> list[Member]:
        return [member for unit in self._units for member in unit.members]

    @property
    def units(self) -> int:
        return len(self._units)

    @property
    def ranks(self) -> Group:
        return self._group


def _keeps_copies(options: _core.TrainingOptions, units: Sequence[UnitOfMembers]) -> bool:
    """Return whether updates change more than the parameter in the memory that torch sees."""
    return options.state != _core.Spread(device=1.0) or any(unit.dtype != torch.float32 for unit in units)
