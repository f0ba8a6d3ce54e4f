"""The state of each element that the library keeps, as torch's optimizers see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.wrapper.sharded_state import ShardedState
from ballast.wrapper.state import LazyState, reads_same
from ballast.wrapper.units import Member
from ballast.wrapper.updates import State


class ShownState:
    """The state that optimizer.state shows of trained parameters. It notices when the user puts other objects in their place,
    and looks at no value."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, LazyState]] = {}  # by id of the parameter
        self._objects: StateObjects | None = None  # when the state was last found to be as it was shown

    def show(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, values: dict[str, LazyState]) -> None:
        optimizer.state[parameter] = {**values}
        self._values[id(parameter)] = values

    def is_as_shown(self, optimizer: torch.optim.Optimizer, members: Sequence[Member]) -> bool:
        if self._objects is None or not self._objects.are_in(optimizer.state):
            if not all(self._has_kept(optimizer, member.parameter) for member in members):
                return False
            self._objects = StateObjects(optimizer.state)
        return True

    def _has_kept(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
        now, shown = optimizer.state.get(parameter), self._values.get(id(parameter))
        if not isinstance(now, dict) or shown is None or not all(reads_same(now.get(name), shown[name]) for name in shown):
            return False
        self._values[id(parameter)] = {name: now[name] for name in shown}  # they may be on another device
        return True


class StateObjects:
    """All keys, dictionaries and values of an optimizer.state. Each step compares them twice, so no Python code runs for each
    parameter."""

    def __init__(self, state: Mapping[Any, Any]):
        self._keys = [*state]
        self._entries = [each for each in state.values() if isinstance(each, dict)]
        self._values = [*_values_in(self._entries)]

    def are_in(self, state: Mapping[Any, Any]) -> bool:
        if len(state) != len(self._entries) or not all(map(is_, state, self._keys)):
            return False
        if not all(map(is_, state.values(), self._entries)) or sum(map(len, self._entries)) != len(self._values):
            return False
        return all(map(is_, _values_in(self._entries), self._values))


def _values_in(entries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, entries))


def changed_state(optimizer: torch.optim.Optimizer, shards: ShardedState, members: Sequence[Member]) -> State:
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


def lazy_moment(shards: ShardedState, member: Member, moment: _core.Moment, name: str) -> LazyState:
    """Return a value of each element that is read when it is used: full if this rank keeps all of it, else its shard,
    one-dimensional."""
    parameter = member.parameter
    parts = shards.parts(parameter)
    is_full = sum(count for _, count in parts) == parameter.numel()

    def read() -> torch.Tensor:
        full = shards.read_moment(parameter, moment)
        own = [full.view(-1)[first : first + count] for first, count in parts]
        return full if is_full else torch.cat([full.new_empty(0), *own])

    shape = tuple(parameter.shape) if is_full else (sum(count for _, count in parts),)
    return LazyState(shape, f"{member.name}, {name}", read)


def begun_in(state: State, moments: State) -> State:
    """Return the moments that the state has, of parameters that are not trained any more. `state` has IN_LIBRARY in their
    place."""
    return {
        key: {name: value for name, value in values.items() if state[key].get(name) is IN_LIBRARY}
        for key, values in moments.items()
        if state.get(key)
    }


def full_moment(shards: ShardedState, member: Member, value: torch.Tensor) -> torch.Tensor:
    """Return the moment in fp32, with zeros where other ranks keep it."""
    shape = member.parameter.shape
    value = value.detach().to("cpu", torch.float32).contiguous()
    if value.shape == shape:
        return value
    parts = shards.parts(member.parameter)
    if value.numel() != sum(count for _, count in parts):
        refuse_size(member, value, sum(count for _, count in parts))
    full = torch.zeros(shape, dtype=torch.float32, device="cpu")
    begin = 0
    for first, count in parts:
        full.view(-1)[first : first + count] = value.view(-1)[begin : begin + count]
        begin += count
    return full


def refuse_size(member: Member, value: torch.Tensor, of_shard: int) -> NoReturn:
    """Refuse a value by element that has neither the parameter's shape nor as many elements as this rank's shard."""
    refuse(
        f"cannot load state of {value.numel()} elements: the parameter has another size",
        where=f"parameter {member.name}",
        needed=f"{tuple(member.parameter.shape)}, or this rank's shard of {of_shard} elements",
    )
