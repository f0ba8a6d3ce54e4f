"""Who makes updates, and with them the optimizer's state: the library, by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.wrapper.rules import Group, MakeRule, Rule
from ballast.wrapper.sharded_state import ShardedState
from ballast.wrapper.state import LazyState
from ballast.wrapper.units import Member

State = dict[int, dict[str, Any]]  # by id of the parameter, with torch's names
MOMENTS = (_core.Moment.momentum, _core.Moment.variance)


CustomStep = Callable[[torch.optim.Optimizer, ShardedState, Sequence[_core.TileToUpdate], float], None]


class Updates(Protocol):
    """What differs between optimizers."""

    @property
    def own_step(self) -> CustomStep | None:
        """None: the library makes them, by its rule."""

    def rule(self, group: Group) -> Rule: ...

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        """That the library keeps, with torch's names."""

    def begin(self, optimizer: torch.optim.Optimizer, partition: ShardedState, state: State) -> None:
        """Takes over the state so far, and shows it in optimizer.state. All ranks do this together."""

    def left_of_state(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> State | None:
        """What there is in optimizer.state, if something was taken out of it that the library keeps; else None."""

    def take_out(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> State:
        """What is not in the library's memory: all of it, on every rank."""

    def leave(self) -> None:
        """The partition goes, and its memory."""

    def leave_device(self, optimizer: torch.optim.Optimizer) -> None:
        """State that is not in the library's memory goes to the host, until the next step."""

    def state_bytes(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> int:
        """Of this rank, in memory that is not the library's."""


class RuleUpdates:
    """Those of the library, which keeps up to two moments of each parameter, and counts steps."""

    def __init__(self, make_rule: MakeRule):
        self._make_rule = make_rule

    @property
    def own_step(self) -> None:
        return None

    def rule(self, group: Group) -> Rule:
        return self._make_rule(group)

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        rule = self.rule(optimizer.param_groups[0])
        return [(moment, name) for moment, name in zip(MOMENTS, _core.state_names(rule)) if name]

    def begin(self, optimizer: torch.optim.Optimizer, partition: ShardedState, state: State) -> None:
        names = self.moments(optimizer)
        if moments := _moments(partition, names, state):
            partition.write_moments(moments)
        for member in partition.members:
            optimizer.state[member.parameter] = {
                "step": LazyState((), f"{member.name}, step", partial(steps_of, partition, member)),
                **{name: _lazy(partition, member, moment, name) for moment, name in names},
            }

    def left_of_state(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> State | None:
        missing = [member for member in partition.members if member.parameter not in optimizer.state]
        if not missing:
            return None
        if len(missing) < len(partition.members) and partition.sharing is not None:
            refuse(
                "cannot take over optimizer.state: the state of some parameters was removed, and ranks have shards of the rest",
                where=f"parameter {missing[0].name}",
                needed="optimizer.state.clear(); or stage 0",
            )
        return {id(parameter): values for parameter, values in optimizer.state.items()}

    def take_out(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> State:
        return {id(member.parameter): {"step": steps_of(partition, member)} for member in partition.members}

    def leave(self) -> None:
        pass

    def leave_device(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def state_bytes(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> int:
        return 0


def _moments(
    partition: ShardedState, names: list[tuple[_core.Moment, str]], state: State
) -> dict[tuple[int, _core.Moment], torch.Tensor]:
    moments = {}
    for member in partition.members:
        for moment, name in names:
            value = state.get(id(member.parameter), {}).get(name)
            if value is not None:
                moments[id(member.parameter), moment] = _whole_moment(partition, member, value)
    return moments


def _lazy(partition: ShardedState, member: Member, moment: _core.Moment, name: str) -> LazyState:
    """Of all of the parameter where this rank keeps all, else of its part, one-dimensional."""
    parameter = member.parameter
    parts = partition.parts(parameter)
    is_whole = sum(count for _, count in parts) == parameter.numel()

    def read() -> torch.Tensor:
        whole = partition.read_moment(parameter, moment)
        own = [whole.view(-1)[first : first + count] for first, count in parts]
        return whole if is_whole else torch.cat([whole.new_empty(0), *own])

    shape = tuple(parameter.shape) if is_whole else (sum(count for _, count in parts),)
    return LazyState(shape, f"{member.name}, {name}", read)


def merged(one: State, other: State) -> State:
    """What is known of parameters here and there."""
    both = {key: {**one.get(key, {}), **other.get(key, {})} for key in {**one, **other}}
    return {key: values for key, values in both.items() if values}


def steps_in(state: State) -> dict[int, int]:
    """That have trained each parameter, where that is known."""
    return {key: int(values["step"]) for key, values in state.items() if _is_count(values.get("step"))}


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def steps_of(partition: ShardedState, member: Member) -> torch.Tensor:
    """As torch counts them."""
    return torch.tensor(float(partition.steps - member.begun_at))


def _whole_moment(partition: ShardedState, member: Member, value: torch.Tensor) -> torch.Tensor:
    """In fp32, zero where other ranks keep it."""
    shape = member.parameter.shape
    value = value.detach().to("cpu", torch.float32).contiguous()
    if value.shape == shape:
        return value
    parts = partition.parts(member.parameter)
    if value.numel() != sum(count for _, count in parts):
        refuse(
            f"cannot load state of {value.numel()} elements: the parameter has another size",
            where=f"parameter {member.name}",
            needed=f"{tuple(shape)}, or this rank's shard of {sum(count for _, count in parts)} elements",
        )
    whole = torch.zeros(shape, dtype=torch.float32)
    begin = 0
    for first, count in parts:
        whole.view(-1)[first : first + count] = value.view(-1)[begin : begin + count]
        begin += count
    return whole
