"""The parameters of an optimizer and their state in a training of the library: read and changed between steps, and shown in
optimizer.state, which reads a value when it is used, from the tier where the library keeps it."""

from __future__ import annotations

import copy
import logging
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast._torch_compat import (
    COPY_AS,
    is_in_backward,
    make_wrapper_tensor,
    tree_map,
    without_torch_function,
    writes_to_arguments,
)
from ballast.checks import fail, refuse, refuse_unsupported
from ballast.planning.hardware import available_memory, this_machine
from ballast.ranks import Group, agree_on_memory, from_all_ranks
from ballast.sizes import human_size
from ballast.torch.gpu import free_bytes, in_stream, require_stream, return_cached_memory
from ballast.torch.memory import keep_freed_memory, resident_bytes, return_freed_memory
from ballast.torch.parameters.deferred_parameters import InitialValueReader, refuse_to_begin
from ballast.torch.parameters.managed_parameter import is_without_values, managed, nothing_like, plain
from ballast.torch.parameters.parameter_memory import ParameterMemory
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, first_trace, model_of, prefetched
from ballast.torch.parameters.writes import agree_on_writes, is_same_kind, require_same_values
from ballast.torch.process_groups import ProcessGroups

log = logging.getLogger("ballast")


Rule = _core.AdamW | _core.Adam | _core.Sgd | _core.SgdMomentum | _core.Lion | _core.Adagrad | _core.Muon | _core.External
State = dict[int, dict[str, Any]]  # state by id of the parameter, with torch's names
Moments = Mapping[tuple[int, _core.Moment], torch.Tensor]  # moments by id of the parameter: in fp32, of the full parameter
# Whether to visit a tile with these parts, each with its first element in the tile, and with this record of a run.
Filter = Callable[[Sequence[tuple[_core.StatePart, int]], _core.OpenRecord | None], bool]
RETURNED_EVERY = 64 << 20  # bytes of freed parameters that torch's cache returns to the GPU together: each return waits for it


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
        self.groups, self.ranks = ranks, ranks.data_group
        self.all_members = [member for unit in units for member in unit.members]
        self.members = [member for unit in units for member in unit.trained]
        self._index = {id(member.parameter): number for number, member in enumerate(self.members)}
        self._gpu, self._stream = options.gpu, options.stream
        self.keeps_run = bool(options.run)
        self.stage = options.stage
        return_cached_memory(self._gpu)
        model = model_of(units)
        options.trace = first_trace(units, model, options.stage)
        options.prefetch = prefetched(units, options.prefetch)
        self.core = _core.Training(
            model=model,
            group=ranks.data_group,
            norm_group=ranks.model_group,
            rules=rules,
            options=options,
        )
        for number, unit in enumerate(units):
            for member, begin in zip(unit.members, self.core.tensor_begins(number)):
                member.begin = begin
        self._pass_on_log()
        if self.core.unpinned_because:
            log.warning("host memory could not be pinned, so copies of it are slower: %s", self.core.unpinned_because)
        self.unused: set[UnitParameter] = set()  # members that this step leaves as they are: no rank has a gradient
        self._start()
        self._kept_memory = KeptMemory() if self._gpu is None else None
        return_cached_memory(self._gpu)
        self.memory = make_memory(self.core, units)
        self._is_shared = options.stage > 0 and self.ranks.size > 1  # each rank has a shard of the state
        # Updates then change more than the parameter in the memory that torch sees.
        is_away = options.state != _core.Spread(device=1.0)
        self._update_is_elsewhere = is_away or any(unit.dtype != torch.float32 for unit in units)

    def _pass_on_log(self) -> None:
        """Pass the library's log on to Python's logger."""
        for level, line in self.core.take_log():
            log.log(level, "%s", line)

    def _start(self) -> None:
        """Copy parameters unit by unit, and free torch's memory of each: no rank holds all parameters twice."""
        for member in self.all_members:
            is_kept = self.core.found and member.group is not None
            if not is_kept and (found := managed(member.parameter)) is not None and found.lacks_values:
                refuse_to_begin(member.name)
        if not self.core.found:
            there = [member for member in self.all_members if not is_without_values(member.parameter)]
            require_same_values(self.ranks, there, "cannot begin to train")
            self._require_room()
        values, freed, cached = InitialValueReader(), 0, 0

        def free(units: int) -> None:
            nonlocal freed, cached
            if freed < units:
                values.forget()
            for unit in self.units[freed:units]:
                cached += sum(map(_bytes_of, unit.members))
                _free(unit.members)
            freed = max(freed, units)
            if cached >= RETURNED_EVERY:
                return_cached_memory(self._gpu)
                cached = 0

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            free(unit)
            member = self.units[unit].members[tensor]
            values.read(member.parameter, *member.parameter_range(first, count), into)
            return True

        if self.core.found:  # the run has their values
            _free(self.members)
            return_cached_memory(self._gpu)
        self.core.start(fill)
        free(len(self.units))

    def _require_room(self) -> None:
        """Refuse to begin where the GPU has too little memory, before torch's parameters are freed. Parameters and state take
        their place unit by unit, unless autograd has saved them for a backward pass, so that they cannot be freed."""
        if self._gpu is None:
            return
        needed, free = self.core.unreserved_bytes, free_bytes(self._gpu)
        sizes = [sum(_bytes_of(each) for each in unit.members if not is_without_values(each.parameter)) for unit in self.units]
        if not is_in_backward() and (moved := sum(sizes)) > 0:
            in_flight = max(sizes) * (2 + needed / moved) + RETURNED_EVERY  # a unit that is there twice, and the one before
            needed = min(needed, max(needed - moved, 0) + int(in_flight))
        agree_on_memory(self.ranks, "the beginning of the training", needed > free)
        if needed > free:
            fail(
                "device_memory",
                "cannot begin to train: parameters and state do not fit next to the parameters that torch still has",
                needed=human_size(needed),
                available=human_size(free),
                remedy="Move state to a lower tier. Or construct the model in ballast.deferred(), which makes parameters where "
                "they stay. Or call the model of ballast.wrap(optimizer, model): training then begins before its forward pass.",
            )

    def require_room_to_close(self) -> None:
        """Refuse to return all parameters to torch where they do not fit: the system would end the process in the middle of
        it. All ranks call it together. On a host the ranks of a machine share its memory."""
        mine = sum(_bytes_of(member) for member in self.all_members)
        return_cached_memory(self._gpu)
        available = available_memory(this_machine()) if self._gpu is None else free_bytes(self._gpu)
        where = socket.gethostname() if self._gpu is None else f"GPU of rank {self.ranks.rank}"
        found = from_all_ranks(self.ranks, (where, mine, available))
        for rank, (where, _, available) in enumerate(found):
            needed = sum(theirs for there, theirs, _ in found if there == where)
            if needed > available:
                sharing = f" for all ranks of {where}" if needed > mine else ""
                fail(
                    "memory_budget",
                    "cannot close the optimizer: each rank would have all parameters in torch's memory, and they do not fit",
                    where=f"rank {rank}",
                    needed=human_size(needed) + sharing,
                    available=human_size(available),
                    remedy="Call ballast.save(), unless drives keep a run, and optimizer.close(gather=False), on all ranks: "
                    "the model then loses its values. `ballast export` writes the weights of a checkpoint to a file.",
                )

    def _acquire_gradients(self, unit: int) -> _core.Memory:
        if self._gpu is not None:
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
            before = member.begin - tile.first  # the parameter's first element in the tile
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
        self.core.offload(parameters=parameters, agree=partial(agree_on_memory, self.ranks, "offload()"))
        if parameters:
            self.memory.offload()

    def reload(self) -> None:
        """Bring everything back. Any stream may be current, because close() reloads a training that is offloaded."""
        with in_stream(self._gpu, self._stream):
            return_cached_memory(self._gpu)
            self.core.reload(agree=partial(agree_on_memory, self.ranks, "reload()"))
            self.memory.reload()

    # --- Checkpoints ---

    def member_of(self, part: _core.StatePart) -> UnitParameter:
        return self.units[part.unit].members[part.tensor]

    def visit_shards(self, visit: Callable[[_core.StatePart], None], which: Filter | None = None) -> None:
        """Read the shards one by one, or those of the tiles that `which` returns True for. All ranks call it together, because
        parameters may have been written to."""
        require_stream(self._gpu, self._stream)
        self.accept_writes()
        self.memory.release_unit()
        self.core.visit_shards(visit, which)

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


def _bytes_of(member: UnitParameter) -> int:
    return member.elements * int(member.dtype.itemsize)


def _free(members: Sequence[UnitParameter]) -> None:
    """Free torch's memory of these parameters."""
    for member in members:
        with without_torch_function():  # it may be without values already
            member.parameter.data = nothing_like(member.parameter, member.parameter.device)


def is_freed(parameter: torch.nn.Parameter) -> bool:
    """Return whether torch's memory of a parameter is freed, and no training has its values."""
    if managed(parameter) is not None or parameter.layout is not torch.strided:
        return False
    lacks_memory: bool = plain(parameter).untyped_storage().nbytes() < parameter.nbytes
    return lacks_memory


LEAST_BOUND, COMPARED_EVERY = 24 << 20, 8 << 20


class KeptMemory:
    """Keeps freed memory in the process, and returns it where it grows beyond a bound.

    glibc cannot place a tensor in the hole that one of the same size has left, because it requests more, to align the tensor.
    The holes of gradients would add up to more than all gradients of the model. So the resident memory may exceed the most
    that was in use by 24 MiB, or a 32nd. Holes that are returned are seldom used again: a training returns them several times
    in its first step, and then every tenth step or so.
    """

    def __init__(self) -> None:
        return_freed_memory()
        keep_freed_memory()
        self._in_use = resident_bytes()
        self._arrived = 0  # bytes of gradients since the memory was last compared with the bound

    def count(self, gradients: int) -> None:
        """Count this many bytes of gradients, of which most are freed."""
        self._arrived += gradients
        if self._arrived < COMPARED_EVERY:
            return
        self._arrived = 0
        if resident_bytes() > self._in_use + max(LEAST_BOUND, self._in_use // 32):
            return_freed_memory()
            self._in_use = max(self._in_use, resident_bytes())


# --- The state in torch's form ---

PART = "ballast_part"  # the key in a state_dict() for the rank that it belongs to
REMEDY = "Call ballast.save() and ballast.load_checkpoint() on all ranks; or save and load a file for each rank."


class LazyState(torch.Tensor):
    """A moment, or the count of steps. Each use reads it, so it needs no memory and is always current."""

    read_now: Callable[[], torch.Tensor]
    place: str

    @staticmethod
    def of(shape: Sequence[int], name: str, read: Callable[[], torch.Tensor], device: torch.device | None = None) -> LazyState:
        made = make_wrapper_tensor(LazyState, shape, dtype=torch.float32, device=device or torch.device("cpu"))
        assert isinstance(made, LazyState)
        made.read_now, made.place = read, name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyState({self.place}, {self.read_now()!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        options = kwargs or {}
        if func is COPY_AS and options.get("device") is not None and options.get("dtype", torch.float32) == torch.float32:
            lazy: Any = args[0]  # it is moved, and stays as it is
            return LazyState.of(lazy.shape, lazy.place, lazy.read_now, options["device"])
        if writes_to_arguments(func) and isinstance(args[0], LazyState):
            refuse_unsupported(
                f"cannot change the optimizer's state with {func}: it would change a copy",
                where=args[0].place,
                needed="optimizer.load_state_dict()",
            )
        plain = lambda each: each.read_there() if isinstance(each, LazyState) else each
        return func(*tree_map(plain, tuple(args)), **tree_map(plain, options))

    def read_there(self) -> torch.Tensor:
        return self.read_now().to(self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read_now().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.read_now(), memo)


def is_current_state(loaded: Mapping[int, dict[str, Any]], now: Mapping[torch.Tensor, dict[str, Any]]) -> bool:
    """Return whether the loaded state, by id of the parameter, is the current state.

    Accelerate loads the optimizer's own state_dict() after it has moved it to the optimizer's device.
    """
    return bool(now) and all(
        (other := loaded.get(id(parameter))) is None
        or (values.keys() == other.keys() and all(reads_same(value, other[name]) for name, value in values.items()))
        for parameter, values in now.items()
    )


def reads_same(one: Any, other: Any) -> bool:
    """Return whether both values are lazy and read the same state, on whichever devices."""
    return isinstance(one, LazyState) and isinstance(other, LazyState) and one.read_now is other.read_now


def read_of(state: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the state as it is now."""
    return {
        key: {name: value.read_there() if isinstance(value, LazyState) else value for name, value in values.items()}
        for key, values in state.items()
    }


def warn_of_local_shard(group: Group) -> None:
    """Warn that a state_dict() holds one rank's shard. The warning names the line that called state_dict()."""
    warnings.warn(
        f"this state_dict() holds only the shard of rank {group.rank} of {group.size}, and rank 0's alone cannot be resumed. "
        + REMEDY,
        UserWarning,
        stacklevel=3,
    )


def require_local_shard(state_dict: Mapping[str, Any], group: Group) -> None:
    """Refuse the shard of another rank, and one of another number of ranks."""
    part = state_dict.get(PART)
    if part is None or not state_dict["state"] or part == {"rank": group.rank, "ranks": group.size}:
        return
    refuse_unsupported(
        f"rank {group.rank} of {group.size} cannot load the state_dict() of rank {part['rank']} of {part['ranks']}",
        needed="its own: each rank keeps a shard of the state",
        remedy=REMEDY,
    )


def changed_state(optimizer: torch.optim.Optimizer, shards: ShardedState, members: Sequence[UnitParameter]) -> State:
    """Return optimizer.state, which the user has changed. It may lack state of all of these members."""
    missing = [member for member in members if member.parameter not in optimizer.state]
    if 0 < len(missing) < len(members) and shards.sharing is not None:
        refuse(
            "cannot take over optimizer.state: the state of some parameters was removed, and ranks have shards of the rest",
            where=f"parameter {missing[0].name}",
            needed="optimizer.state.clear(); or stage 0",
        )
    return {id(parameter): values for parameter, values in optimizer.state.items()}


class InLibrary(Enum):
    """Stands for a value of each element that the partition has already. It is the same object in all processes."""

    IN_LIBRARY = "in the library"


IN_LIBRARY = InLibrary.IN_LIBRARY


def moments_in(
    state: State, shards: ShardedState, names: Sequence[tuple[_core.Moment, str]]
) -> dict[tuple[int, _core.Moment], torch.Tensor]:
    """Return the moments that the state has, as the library takes them over."""
    moments = {}
    for member in shards.members:
        for moment, name in names:
            value = state.get(id(member.parameter), {}).get(name)
            if value is not None and value is not IN_LIBRARY:
                moments[id(member.parameter), moment] = full_moment(shards, member, value)
    return moments


def lazy_moment(shards: ShardedState, member: UnitParameter, moment: _core.Moment, name: str) -> LazyState:
    """Return a value of each element that is read when it is used: full if this rank keeps all of it, else its shard,
    one-dimensional."""
    first, count = shards.part(member)
    is_full = count == member.parameter.numel()

    def read() -> torch.Tensor:
        full = shards.read_moment(member, moment)
        return full if is_full else full.view(-1)[first : first + count].clone()

    shape = tuple(member.parameter.shape) if is_full else (count,)
    return LazyState.of(shape, f"{member.name}, {name}", read)


def begun_in(state: State, moments: State) -> State:
    """Return the moments that the state has, of parameters that are not trained any more. `state` has IN_LIBRARY in their
    place."""
    return {
        key: {name: value for name, value in values.items() if state[key].get(name) is IN_LIBRARY}
        for key, values in moments.items()
        if state.get(key)
    }


def full_moment(shards: ShardedState, member: UnitParameter, value: torch.Tensor) -> torch.Tensor:
    """Return the moment in fp32, with zeros where other ranks keep it."""
    shape = member.parameter.shape
    value = value.detach().to("cpu", torch.float32).contiguous()
    if value.shape == shape:
        return value
    first, count = shards.part(member)
    if value.numel() != count:
        refuse_size(member, value, count)
    full = torch.zeros(shape, dtype=torch.float32, device="cpu")
    full.view(-1)[first : first + count] = value.view(-1)
    return full


def refuse_size(member: UnitParameter, value: torch.Tensor, shard_elements: int) -> NoReturn:
    """Refuse a value by element that has neither the parameter's shape nor as many elements as this rank's shard."""
    refuse(
        f"cannot load state of {value.numel()} elements: the parameter has another size",
        where=f"parameter {member.name}",
        needed=f"{tuple(member.parameter.shape)}, or this rank's shard of {shard_elements} elements",
    )
