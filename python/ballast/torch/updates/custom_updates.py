"""Optimizers without a rule of the library: their own step runs on this rank's shard of each parameter.

CustomUpdates keep the state in torch's memory. With StoredUpdates the library keeps it, in any tier, drives too: then the step
runs tile by tile where state is on drives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ballast import _core
from ballast.checks import refuse
from ballast.ranks import from_all_ranks
from ballast.torch.gpu import wait_for_current_streams
from ballast.torch.memory import tensor_of
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.updates.commit_metadata import (
    ScalarState,
    copied,
    decode_scalars,
    encode_scalars,
    join_scalars,
    require_kept,
)
from ballast.torch.updates.custom_step import CustomStepRunner, Piece, group_of, moved, shape_of, values_of_each_element
from ballast.torch.updates.sharded_state import (
    IN_LIBRARY,
    LazyState,
    Rule,
    ShardedState,
    State,
    changed_state,
    lazy_moment,
    moments_in,
    refuse_size,
)
from ballast.torch.updates.updates import Group, Tiles, Updates, elements_in

Part = tuple[int, int]  # a range of a parameter's elements: first, count


class CustomUpdates(Updates):
    """Updates by the optimizer's own step. The state that the step makes lives in optimizer.state. It is that of the
    full parameter if this rank keeps all of it, else that of its shard, which is one-dimensional."""

    def __init__(self, kind: type[Optimizer]):
        self._step = CustomStepRunner(kind)
        self._parts: dict[int, torch.nn.Parameter] = {}  # the shard in fp32, by id of the parameter

    def rule(self, group: Group) -> Rule:
        return _core.External()

    def custom_step(self, optimizer: Optimizer, shards: ShardedState, tiles: Tiles, factor: float, is_last: bool) -> None:
        """Run the step between the library's sum of gradients and its use of the new parameters. A tile is a shard of a
        unit, as `for_custom_step()` has it."""
        pieces = []
        for tile in tiles:
            for member, _, masters, gradients in elements_in(tile, shards, factor):
                shape = shape_of(member, len(masters))
                part = self._part(optimizer, member, masters.view(shape))
                part.grad = gradients.view(shape)
                pieces.append(Piece(member.parameter, part, optimizer.state.get(member.parameter, {})))
        self._step.run(optimizer, pieces, is_last=is_last)
        for piece in pieces:
            if piece.state:
                optimizer.state[piece.parameter] = piece.state
        wait_for_current_streams([piece.masters for piece in pieces])  # the library continues in streams of its own

    def _part(self, optimizer: Optimizer, member: UnitParameter, values: torch.Tensor) -> torch.nn.Parameter:
        key = id(member.parameter)
        if key not in self._parts:
            self._parts[key] = torch.nn.Parameter(values)
            move_state_to(optimizer, member.parameter, values)
        elif self._parts[key].data_ptr() != values.data_ptr():
            self._parts[key].data = values
        return self._parts[key]

    def begin(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        for member in shards.members:
            part = shards.part(member)
            values = state.get(id(member.parameter))
            if values and part[1] > 0:
                optimizer.state[member.parameter] = {
                    name: copied(value) if name in self.whole_values else shard_of_value(member, part, value)
                    for name, value in values.items()
                }

    def install(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        for member in shards.members:
            if values := state.get(id(member.parameter)):
                optimizer.state[member.parameter] = values

    def take_out(self, optimizer: Optimizer, shards: ShardedState) -> State:
        mine = [(shards.part(member), to_host(optimizer.state.get(member.parameter, {}))) for member in shards.members]
        all_states = from_all_ranks(shards.ranks, mine)
        state = {}
        for number, member in enumerate(shards.members):
            if values := full_state(member, [states[number] for states in all_states], self.whole_values):
                state[id(member.parameter)] = values
        return state

    def forget_partition(self) -> None:
        self._parts = {}

    def offload(self, optimizer: Optimizer) -> None:
        self._parts = {}
        for parameter, values in optimizer.state.items():
            optimizer.state[parameter] = to_host(values)

    def state_bytes(self, optimizer: Optimizer, shards: ShardedState) -> int:
        states = [optimizer.state.get(member.parameter, {}) for member in shards.members]
        return sum(value.nbytes for values in states for value in values.values() if isinstance(value, torch.Tensor))


def shard_of_value(member: UnitParameter, part: Part, value: Any) -> Any:
    """Return a copy of a value of the state. If it has a number for each element, return only those of this shard."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    first, count = part
    if value.shape == member.parameter.shape:
        return value.reshape(-1)[first:][:count].clone().view(shape_of(member, count))
    if value.numel() not in (1, count):
        refuse_size(member, value, count)
    return value.clone()


def move_state_to(optimizer: Optimizer, parameter: torch.Tensor, shard: torch.Tensor) -> None:
    """Move loaded state to the device of the shard."""
    group = group_of(optimizer, parameter)
    values = optimizer.state.get(parameter, {})
    values.update({name: moved(name, value, group, shard) for name, value in values.items()})


def to_host(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def full_state(
    member: UnitParameter, rank_states: Sequence[tuple[Part, dict[str, Any]]], whole_values: frozenset[str]
) -> dict[str, Any]:
    """Return the full state of a parameter. Values by element are joined from all shards; others are the first rank's."""
    rank_states = [(part, values) for part, values in rank_states if values]
    if not rank_states:
        return {}
    state = {}
    for name, value in rank_states[0][1].items():
        by_element = name not in whole_values and all(
            isinstance(values.get(name), torch.Tensor) and values[name].shape == shape_of(member, part[1])
            for part, values in rank_states
        )
        if by_element:
            full = torch.zeros(member.parameter.numel(), dtype=value.dtype, device="cpu")
            for (first, count), values in rank_states:
                full[first : first + count] = values[name].view(-1)
            value = full.view(member.parameter.shape)
        state[name] = value
    return state


@dataclass
class StoredPiece(Piece):
    """A piece whose values of each element are in the library's memory."""

    member: UnitParameter
    values: Mapping[str, torch.Tensor]

    def take_back(self) -> ScalarState:
        """Keep the values of each element that the step has made, and return the state with IN_LIBRARY in their place."""
        scalars: ScalarState = {}
        for name, value in self.state.items():
            stored = self.values.get(name)
            is_like = isinstance(value, torch.Tensor) and stored is not None and value.shape == stored.shape
            if stored is None or not is_like or value.dtype != stored.dtype:
                require_not_by_element(self.member.name, name, value, self.masters.shape)
                scalars[name] = value
                continue
            if value.data_ptr() != stored.data_ptr():
                stored.copy_(value)
            scalars[name] = IN_LIBRARY
        return scalars


class StoredUpdates(Updates):
    """Updates by the optimizer's own step. The library keeps the values of each element, and optimizer.state shows them
    next to the scalars: other values, such as a count of steps."""

    def __init__(self, optimizer: Optimizer):
        self._kind = type(optimizer)  # the optimizer has another class once it is wrapped
        self._step = CustomStepRunner(self._kind)
        self._names: tuple[str, ...] = ()
        self.prepare(optimizer)
        self._begun: set[int] = set()  # ids of parameters that have state
        self._new: dict[int, tuple[UnitParameter, ScalarState]] = {}  # state by parameter id, until the training step ends
        self._may_resume = True  # false once the first partition has begun

    def prepare(self, optimizer: Optimizer) -> None:
        names = values_of_each_element(optimizer, self._kind)
        self._names = tuple(dict.fromkeys([*self._names, *names]))

    def rule(self, group: Group) -> Rule:
        return _core.External(custom_values=len(self._names))

    def moments(self, optimizer: Optimizer) -> list[tuple[_core.Moment, str]]:
        return [(_core.Moment[f"custom_{number}"], name) for number, name in enumerate(self._names)]

    # --- A step ---

    def custom_step(self, optimizer: Optimizer, shards: ShardedState, tiles: Tiles, factor: float, is_last: bool) -> None:
        """Update tiles between the library's sum of gradients and its use of the new parameters."""
        pieces = [piece for tile in tiles for piece in self._pieces(optimizer, shards, tile, factor)]
        self._step.run(optimizer, pieces, is_last=is_last)
        for piece in pieces:
            self._new[id(piece.parameter)] = piece.member, piece.take_back()
        wait_for_current_streams([piece.masters for piece in pieces])  # the library continues in streams of its own
        if is_last:
            for member, scalars in self._new.values():
                self._show(optimizer, shards, member, scalars)
            self._new = {}
            self._set_metadata(optimizer, shards)

    def _pieces(
        self, optimizer: Optimizer, shards: ShardedState, tile: _core.TileToUpdate, factor: float
    ) -> Iterator[StoredPiece]:
        values = [tensor_of(each, torch.float32) for each in tile.own]
        for member, where, masters, gradients in elements_in(tile, shards, factor):
            shape = shape_of(member, len(masters))
            part = torch.nn.Parameter(masters.view(shape))
            part.grad = gradients.view(shape)
            own = {name: each[where].view(shape) for name, each in zip(self._names, values)}
            group = group_of(optimizer, member.parameter)
            shown = optimizer.state[member.parameter] if id(member.parameter) in self._begun else {}
            state = {
                name: own[name] if isinstance(value, LazyState) else moved(name, copied(value), group, part)
                for name, value in shown.items()
            }
            yield StoredPiece(member.parameter, part, state, member, own)

    def _show(self, optimizer: Optimizer, shards: ShardedState, member: UnitParameter, scalars: ScalarState) -> None:
        """Show the state. A scalar stays the same tensor, so that a state_dict() of before is as current as its moments."""
        moments = {name: moment for moment, name in self.moments(optimizer)}
        before = optimizer.state.get(member.parameter, {})
        self._begun.add(id(member.parameter))
        optimizer.state[member.parameter] = {
            name: lazy_moment(shards, member, moments[name], name) if value is IN_LIBRARY else _current(before.get(name), value)
            for name, value in scalars.items()
        }

    def _scalars(self, optimizer: Optimizer, member: UnitParameter) -> ScalarState:
        if id(member.parameter) not in self._begun:
            return {}
        shown = optimizer.state[member.parameter]
        return {name: IN_LIBRARY if isinstance(value, LazyState) else value for name, value in shown.items()}

    # --- A run ---

    @property
    def _kept(self) -> str:
        return f"{', '.join(self._names)} of {self._kind.__module__}.{self._kind.__qualname__}"

    def join_metadata(self, metadata: Sequence[bytes], places: Sequence[int]) -> bytes:
        return join_scalars(self._kept, metadata, places)

    def _set_metadata(self, optimizer: Optimizer, shards: ShardedState) -> None:
        """Keep the scalars with the state in the next commits of a run."""
        if shards.keeps_run:
            shards.core.set_note(encode_scalars(self._kept, [self._scalars(optimizer, member) for member in shards.members]))

    def keep_metadata(self, shards: ShardedState, state: State) -> None:
        if shards.keeps_run and not self._resumes(shards):
            scalars = [_without_values(self._names, member, state) for member in shards.members]
            shards.core.set_note(encode_scalars(self._kept, scalars))

    def _resumes(self, shards: ShardedState) -> bool:
        return self._may_resume and shards.core.found and bool(shards.core.note())

    # --- State ---

    def begin(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        for member in shards.members:
            for name, value in state.get(id(member.parameter), {}).items():
                if name not in self._names:
                    require_not_by_element(member.name, name, value, member.parameter.shape)
        if self._resumes(shards):
            require_kept(self._kept, shards.core.note())
            found = zip(shards.members, decode_scalars(shards.core.note()))
            state = {id(member.parameter): scalars for member, scalars in found if scalars} | state
        self._may_resume = False
        self.install(optimizer, shards, state)
        if moments := moments_in(state, shards, self.moments(optimizer)):
            shards.write_moments(moments)

    def install(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        self._begun = set()
        for member in shards.members:
            scalars = _without_values(self._names, member, state)
            optimizer.state.pop(member.parameter, None)
            if scalars and shards.part(member)[1] > 0:
                self._show(optimizer, shards, member, scalars)
        self._set_metadata(optimizer, shards)

    def changed_state(self, optimizer: Optimizer, shards: ShardedState) -> State | None:
        begun = [member for member in shards.members if id(member.parameter) in self._begun]
        is_there = all(member.parameter in optimizer.state for member in begun)
        if is_there and not any(self._is_replaced(optimizer, member) for member in shards.members):
            return None
        return changed_state(optimizer, shards, begun)

    def _is_replaced(self, optimizer: Optimizer, member: UnitParameter) -> bool:
        """Return whether the user has replaced values of each element. The next step itself begins with other scalars, or
        without state."""
        values = optimizer.state.get(member.parameter, {})
        shown = (values.get(name) for name in self._names)
        return any(isinstance(each, torch.Tensor) and not isinstance(each, LazyState) for each in shown)

    def take_out(self, optimizer: Optimizer, shards: ShardedState) -> State:
        """Return the scalars. A rank has those of parameters of which it has elements, and may get others."""
        all_states = from_all_ranks(shards.ranks, [self._scalars(optimizer, member) for member in shards.members])
        found = zip(shards.members, zip(*all_states))
        return {id(member.parameter): next(filter(None, rank_states), {}) for member, rank_states in found}

    def forget_partition(self) -> None:
        self._begun, self._new = set(), {}

    def state_bytes(self, optimizer: Optimizer, shards: ShardedState) -> int:
        scalars = (value for member in shards.members for value in self._scalars(optimizer, member).values())
        return sum(value.nbytes for value in scalars if isinstance(value, torch.Tensor))


def _without_values(names: tuple[str, ...], member: UnitParameter, state: State) -> ScalarState:
    """Return the state of a parameter, with IN_LIBRARY in place of the values of each element."""
    values = state.get(id(member.parameter), {})
    return {name: IN_LIBRARY if name in names and isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _current(shown: Any, value: Any) -> Any:
    """Return the tensor that is shown already, with the new value, if there is one of its kind."""
    same = isinstance(shown, torch.Tensor) and isinstance(value, torch.Tensor) and not isinstance(shown, LazyState)
    if same and (shown.shape, shown.dtype, shown.device) == (value.shape, value.dtype, value.device):
        return shown.copy_(value)
    return value


def require_not_by_element(parameter: str, name: str, value: Any, shape: torch.Size) -> None:
    """Refuse state of each element that the library does not keep."""
    if isinstance(value, torch.Tensor) and value.shape == shape and value.numel() > 1:
        refuse(
            f"the optimizer's state has {name} of {value.dtype}, which two steps on a few elements did not make",
            where=f"parameter {parameter}",
            needed="the same values of each element as in the first two steps: the library keeps room for those",
            remedy='Wrap it with its state in memory: offload={"state": "host"}, or none.',
        )
