"""The parameters of an optimizer and their state in a training of the library: read and changed between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.connecting import Group
from ballast.torch.collectives import agree_on_memory
from ballast.torch.gpu import in_stream, require_stream, return_cached_memory
from ballast.torch.memory import KeptMemory
from ballast.torch.parameters.deferred_parameters import InitialValueReader, refuse_to_begin
from ballast.torch.parameters.managed_parameter import is_without_values, lacks_values, nothing_like
from ballast.torch.parameters.parameter_memory import ParameterMemory
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, model_of
from ballast.torch.parameters.writes import agree_on_writes, is_same_kind, require_same_values
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.updates.rules import Rule

log = logging.getLogger("ballast")


Moments = Mapping[tuple[int, _core.Moment], torch.Tensor]  # by id of the parameter: in fp32, of the full parameter


class ShardedState:
    """This rank's shards. It is made when the parameters are on the device where they stay."""

    def __init__(
        self,
        units: list[ParameterUnit],
        ranks: ProcessGroups,
        rules: Sequence[Rule],
        options: _core.TrainingOptions,
        make_memory: Callable[[_core.Training, list[ParameterUnit]], ParameterMemory],
    ):
        self.units = units
        self.ranks = ranks.of_data
        self.all_members = [member for unit in units for member in unit.members]
        self.members = [member for unit in units for member in unit.trained]
        self._index = {id(member.parameter): number for number, member in enumerate(self.members)}
        self._gpu, self._stream = options.gpu, options.stream
        self.keeps_run = bool(options.run)
        self.stage = options.stage
        return_cached_memory(self._gpu)
        self.core = _core.Training(
            model=model_of(units),
            group=ranks.of_data._core,
            norm_group=None if ranks.of_model is None else ranks.of_model._core,
            rules=rules,
            options=options,
        )
        self._pass_on_log()
        if self.core.unpinned_because:
            log.warning("host memory could not be pinned, so copies of it are slower: %s", self.core.unpinned_because)
        self.unused: set[UnitParameter] = set()  # members that this step leaves as they are: no rank has a gradient
        self._freed = 0  # units whose parameters have no memory of torch any more
        self._start()
        self._kept_memory = KeptMemory() if self._gpu is None else None
        return_cached_memory(self._gpu)
        self.memory = make_memory(self.core, units)
        self._begins = [self.core.tensor_begins(unit) for unit in range(len(units))]
        self._is_shared = options.stage > 0 and self.ranks.size > 1  # each rank has a shard of the state
        self._update_is_elsewhere = _keeps_copies(options, units)

    def _pass_on_log(self) -> None:
        """Pass the library's log on to Python's logger."""
        for level, line in self.core.take_log():
            log.log(level, "%s", line)

    def _start(self) -> None:
        """Copy parameters unit by unit, and free torch's memory of each: no rank holds all parameters twice."""
        for member in self.all_members:
            is_kept = self.core.found and member.group is not None
            if not is_kept and lacks_values(member.parameter):
                refuse_to_begin(member.name)
        if not self.core.found:
            there = [member for member in self.all_members if not is_without_values(member.parameter)]
            require_same_values(self.ranks, there, "cannot begin to train")
        values = InitialValueReader()

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            self._free(unit)
            member = self.units[unit].members[tensor]
            values.read(member.parameter, *member.of_parameter(first, count), into)
            return True

        self.core.start(fill)
        self._free(len(self.units))

    def _free(self, units: int) -> None:
        """Free torch's memory of the parameters of this many units."""
        for unit in self.units[self._freed : units]:
            for member in unit.members:
                with without_torch_function():  # it may be without values already
                    member.parameter.data = nothing_like(member.parameter, member.parameter.device)
        self._freed = max(self._freed, units)

    def _acquire_gradients(self, unit: int) -> _core.Memory:
        require_stream(self._gpu, self._stream)
        memory = self.core.acquire_gradients(unit)
        if self._kept_memory is not None:
            self._kept_memory.count(memory.bytes)
        return memory

    @property
    def steps(self) -> int:
        return self.core.steps

    def trains(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._index

    def part(self, member: UnitParameter) -> tuple[int, int]:
        """Return the elements whose state this rank keeps, as the first and their count. Of a frozen parameter, return those of
        its values."""
        parts = self.core.parts(member.unit, member.tensor)
        return parts[0] if parts else (0, 0)  # a shard is one range, and so is its part of a parameter

    def in_tile(self, tile: _core.TileToUpdate) -> Iterator[tuple[UnitParameter, int, int]]:
        """Yield the members that the step updates with elements in a tile, where these begin in the tile, and how many there
        are."""
        for member in self.units[tile.unit].trained:
            if member in self.unused:
                continue
            begin, count = self.part(member)
            before = self._begins[tile.unit][member.tensor] - tile.first  # of the parameter's first element, in the tile
            first, end = max(begin, -before), min(begin + count, tile.count - before)
            if first < end:
                yield member, before + first, end - first

    def read_moment(self, member: UnitParameter, moment: _core.Moment) -> torch.Tensor:
        """Return the moment of the full parameter, with zeros where other ranks keep it."""
        self.memory.release_unit()
        full = torch.zeros(member.parameter.shape, dtype=torch.float32, device="cpu")
        self.core.read_moment(member.unit, member.tensor, moment, into=full.data_ptr())
        return full

    @property
    def sharing(self) -> Group | None:
        """The ranks that each keep a shard of the state; None if this rank keeps all of it."""
        return self.ranks if self._is_shared else None

    def writes(self, *, with_casts: bool) -> dict[UnitParameter, torch.Tensor]:
        """Return the parameters that were written to, each with its place. Those that were cast have none to go to, and are
        refused where a step needs them."""
        found = self.memory.writes() if self.memory.sees_writes else {}
        return found if with_casts else {each: place for each, place in found.items() if is_same_kind(each.parameter, place)}

    def accept_writes(self, *, with_casts: bool = True) -> None:
        """Accept writes to parameters that any rank has made since the last step. All ranks call it together."""
        if not self.memory.sees_writes:
            return
        writes = self.writes(with_casts=with_casts)
        [written] = self.ranks.all_reduce([len(writes)])
        if written > 0:
            self._take_over(writes)

    def _take_over(self, writes: Mapping[UnitParameter, torch.Tensor]) -> None:
        """Take over the written parameters. All ranks call it together, if one rank has written."""
        before = {member: writes.get(member, member.parameter.data) for member in self.members}
        written = agree_on_writes(self.ranks, before, writes, self.memory.require_acceptable_writes)
        self.memory.accept_writes()
        if self._update_is_elsewhere:
            self.core.take_full_parameters({(member.unit, member.tensor) for member in written})
        else:
            self.core.parameters_changed()

    def write_moments(self, moments: Moments) -> None:
        """Write moments, and zeros where there are none. All ranks call it together."""

        def address_of(unit: int, tensor: int, moment: _core.Moment) -> int:
            found = moments.get((id(self.units[unit].members[tensor].parameter), moment))
            return 0 if found is None else found.data_ptr()

        self.memory.release_unit()
        self.core.write_moments(address_of)

    # --- While something else needs the device ---

    def offload(self, parameters: bool) -> None:
        """Free the device's memory, with or without that of the parameters. All ranks call it together."""
        self.memory.require_offloadable(parameters)
        self.memory.require_not_gathered("cannot offload the training")
        self.memory.release_unit()
        self.core.offload(parameters=parameters, agree=agree_on_memory(self.ranks, "offload()"))
        if parameters:
            self.memory.offload()

    def reload(self) -> None:
        """Bring everything back. Any stream may be current, because close() reloads a training that is offloaded."""
        with in_stream(self._gpu, self._stream):
            return_cached_memory(self._gpu)
            self.core.reload(agree=agree_on_memory(self.ranks, "reload()"))
            self.memory.reload()

    # --- Checkpoints ---

    def member_of(self, part: _core.StatePart) -> UnitParameter:
        return self.units[part.unit].members[part.tensor]

    def visit_shards(self, visit: Callable[[_core.StatePart], None]) -> None:
        """Read the shards one by one. All ranks call it together, because parameters may have been written to."""
        require_stream(self._gpu, self._stream)
        self.accept_writes()
        self.memory.release_unit()
        self.core.visit_shards(visit)

    def change_shards(self, change: Callable[[_core.StatePart], None], steps: int, agree: Callable[[], None]) -> None:
        """Change the shards one by one, and call `agree` before drives commit them as of this number of steps. All
        ranks call it together. No graph of before can use the parameters any more."""
        self._replace_shards(change, steps, agree)
        self.memory.after_load()

    def move_shards(self, change: Callable[[_core.StatePart], None]) -> None:
        """Change the shards one by one to those of the same values in another training. All ranks call it together."""
        self._replace_shards(change, self.steps, lambda: None)

    def _replace_shards(self, change: Callable[[_core.StatePart], None], steps: int, agree: Callable[[], None]) -> None:
        def agreed() -> None:
            agree()
            self.core.set_steps(steps)

        require_stream(self._gpu, self._stream)
        self.memory.release_unit()
        self.core.change_shards(change, agreed)


def _keeps_copies(options: _core.TrainingOptions, units: Sequence[ParameterUnit]) -> bool:
    """Return whether updates change more than the parameter in the memory that torch sees."""
    return options.state != _core.Spread(device=1.0) or any(unit.dtype != torch.float32 for unit in units)
