"""How updates are made, and where the optimizer's state is: the protocol, and updates by a rule of the library."""

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
    """The differences between optimizers."""

    @property
    def own_step(self) -> CustomStep | None:
        """The step of the optimizer's own class; None if the library makes updates by a rule."""

    def rule(self, group: Group) -> Rule: ...

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        """Return the moments that the library keeps, with torch's names."""

    def begin(self, optimizer: torch.optim.Optimizer, kept: ShardedState, state: State) -> None:
        """Take the state over, and show it in optimizer.state. All ranks do this together."""

    def left_of_state(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State | None:
        """Return optimizer.state if state that the library keeps was removed from it; else None."""

    def take_out(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State:
        """Return the full state outside the library's memory, on every rank."""

    def forget_partition(self) -> None:
        """Forget the partition's memory, which is about to be freed."""

    def offload(self, optimizer: torch.optim.Optimizer) -> None:
        """Move state outside the library's memory to the host, until the next step."""

    def state_bytes(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> int:
        """Return the bytes of this rank's state outside the library's memory."""


class RuleUpdates:
    """Updates by a rule of the library, which keeps up to two moments of each parameter, and counts steps."""

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

    def begin(self, optimizer: torch.optim.Optimizer, kept: ShardedState, state: State) -> None:
        names = self.moments(optimizer)
        if moments := _moments(kept, names, state):
            kept.write_moments(moments)
        for member in kept.members:
            optimizer.state[member.parameter] = {
                "step": LazyState((), f"{member.name}, step", partial(steps_of, kept, member)),
                **{name: _lazy(kept, member, moment, name) for moment, name in names},
            }

    def left_of_state(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State | None:
        missing = [member for member in kept.members if member.parameter not in optimizer.state]
        if not missing:
            return None
        if len(missing) < len(kept.members) and kept.sharing is not None:
            refuse(
                "cannot take over optimizer.state: the state of some parameters was removed, and ranks have shards of the rest",
                where=f"parameter {missing[0].name}",
                needed="optimizer.state.clear(); or stage 0",
            )
        return {id(parameter): values for parameter, values in optimizer.state.items()}

    def take_out(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State:
        return {id(member.parameter): {"step": steps_of(kept, member)} for member in kept.members}

    def forget_partition(self) -> None:
        pass

    def offload(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def state_bytes(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> int:
        return 0


def _moments(
    kept: ShardedState, names: list[tuple[_core.Moment, str]], state: State
) -> dict[tuple[int, _core.Moment], torch.Tensor]:
    moments = {}
    for member in kept.members:
        for moment, name in names:
            value = state.get(id(member.parameter), {}).get(name)
            if value is not None:
                moments[id(member.parameter), moment] = _full_moment(kept, member, value)
    return moments


def _lazy(kept: ShardedState, member: Member, moment: _core.Moment, name: str) -> LazyState:
    """Return a moment that is read when it is used: full if this rank keeps all of it, else its shard,
    one-dimensional."""
    parameter = member.parameter
    parts = kept.parts(parameter)
    is_full = sum(count for _, count in parts) == parameter.numel()

    def read() -> torch.Tensor:
        full = kept.read_moment(parameter, moment)
        own = [full.view(-1)[first : first + count] for first, count in parts]
        return full if is_full else torch.cat([full.new_empty(0), *own])

    shape = tuple(parameter.shape) if is_full else (sum(count for _, count in parts),)
    return LazyState(shape, f"{member.name}, {name}", read)


def merged(one: State, other: State) -> State:
    """Return the union of two states, which may have different values of one parameter."""
    both = {key: {**one.get(key, {}), **other.get(key, {})} for key in {**one, **other}}
    return {key: values for key, values in both.items() if values}


def steps_in(state: State) -> dict[int, int]:
    """Return the count of steps of each parameter whose state has one."""
    return {key: int(values["step"]) for key, values in state.items() if _is_count(values.get("step"))}


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def steps_of(kept: ShardedState, member: Member) -> torch.Tensor:
    """Return the count of steps of a parameter, in the form in which torch keeps it."""
    return torch.tensor(float(kept.steps - member.begun_at), device="cpu")


def _full_moment(kept: ShardedState, member: Member, value: torch.Tensor) -> torch.Tensor:
    """Return the moment in fp32, with zeros where other ranks keep it."""
    shape = member.parameter.shape
    value = value.detach().to("cpu", torch.float32).contiguous()
    if value.shape == shape:
        return value
    parts = kept.parts(member.parameter)
    if value.numel() != sum(count for _, count in parts):
        refuse(
            f"cannot load state of {value.numel()} elements: the parameter has another size",
            where=f"parameter {member.name}",
            needed=f"{tuple(shape)}, or this rank's shard of {sum(count for _, count in parts)} elements",
        )
    full = torch.zeros(shape, dtype=torch.float32, device="cpu")
    begin = 0
    for first, count in parts:
        full.view(-1)[first : first + count] = value.view(-1)[begin : begin + count]
        begin += count
    return full
