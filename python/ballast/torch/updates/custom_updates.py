"""Optimizers without a rule of the library: their own step runs on this rank's shard of each parameter, and keeps its state
in torch's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ballast import _core
from ballast.torch.collectives import from_all_ranks
from ballast.torch.gpu import wait_for_current_streams
from ballast.torch.memory import tensor_of
from ballast.torch.parameters.units import TORCH_DTYPES, Member
from ballast.torch.updates.commit_metadata import copied
from ballast.torch.updates.custom_step import CustomStepRunner, Piece, group_of, moved, shape_of
from ballast.torch.updates.rules import Group, Rule
from ballast.torch.updates.sharded_state import ShardedState
from ballast.torch.updates.shown_state import refuse_size
from ballast.torch.updates.updates import State, StepCall

Part = tuple[int, int]  # a range of a parameter's elements: first, count


class CustomUpdates:
    """Updates by the optimizer's own step. The state that the step makes lives in optimizer.state. It is that of the
    full parameter if this rank keeps all of it, else that of its shard, which is one-dimensional."""

    whole_values: frozenset[str] = frozenset()

    def __init__(self, kind: type[torch.optim.Optimizer]):
        self._step = CustomStepRunner(kind)
        self._parts: dict[int, torch.nn.Parameter] = {}  # by id of the parameter: its shard in fp32

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def rule(self, group: Group) -> Rule:
        return _core.External()

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        return []

    def custom_step(self, optimizer: torch.optim.Optimizer, shards: ShardedState, call: StepCall) -> None:
        """Run the step between the library's sum of gradients and its use of the new parameters. A tile is a shard of a
        unit, as `for_custom_step()` has it."""
        pieces = []
        for tile in call.tiles:
            gradients = tensor_of(tile.gradients, TORCH_DTYPES[tile.gradient_dtype]).float().mul_(call.factor)
            masters = tensor_of(tile.masters, torch.float32)
            for member, begin, count in shards.in_tile(tile):
                shape = shape_of(member, count)
                part = self._part(optimizer, member, masters[begin:][:count].view(shape))
                part.grad = gradients[begin:][:count].view(shape).to(part.device)
                pieces.append(Piece(member.parameter, part, optimizer.state.get(member.parameter, {})))
        self._step.run(optimizer, pieces, is_last=call.is_last)
        for piece in pieces:
            if piece.state:
                optimizer.state[piece.parameter] = piece.state
        wait_for_current_streams([piece.masters for piece in pieces])  # the library continues in streams of its own

    def _part(self, optimizer: torch.optim.Optimizer, member: Member, values: torch.Tensor) -> torch.nn.Parameter:
        key = id(member.parameter)
        if key not in self._parts:
            self._parts[key] = torch.nn.Parameter(values)
            move_state_to(optimizer, member.parameter, values)
        elif self._parts[key].data_ptr() != values.data_ptr():
            self._parts[key].data = values
        return self._parts[key]

    def begin(self, optimizer: torch.optim.Optimizer, shards: ShardedState, state: State) -> None:
        for member in shards.members:
            part = shards.part(member)
            values = state.get(id(member.parameter))
            if values and part[1] > 0:
                optimizer.state[member.parameter] = {
                    name: copied(value) if name in self.whole_values else shard_of_value(member, part, value)
                    for name, value in values.items()
                }

    def keep_note(self, shards: ShardedState, state: State) -> None:
        pass

    def resume_note(self, shards: ShardedState) -> None:
        for member in shards.members:
            member.missed = 0  # the optimizer's own step counts its steps

    def join_notes(self, notes: Sequence[bytes], places: Sequence[int]) -> bytes:
        return b""

    def install(self, optimizer: torch.optim.Optimizer, shards: ShardedState, state: State) -> None:
        for member in shards.members:
            if values := state.get(id(member.parameter)):
                optimizer.state[member.parameter] = values

    def unbegun(self, shards: ShardedState) -> list[torch.nn.Parameter]:
        return []  # the optimizer's own step makes the entries

    def changed_state(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> None:
        return None  # optimizer.state is the state itself

    def take_out(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> State:
        mine = [(shards.part(member), to_host(optimizer.state.get(member.parameter, {}))) for member in shards.members]
        of_all = from_all_ranks(shards.ranks, mine)
        state = {}
        for number, member in enumerate(shards.members):
            if values := full_state(member, [of_rank[number] for of_rank in of_all], self.whole_values):
                state[id(member.parameter)] = values
        return state

    def forget_partition(self) -> None:
        self._parts = {}

    def offload(self, optimizer: torch.optim.Optimizer) -> None:
        self._parts = {}
        for parameter, values in optimizer.state.items():
            optimizer.state[parameter] = to_host(values)

    def state_bytes(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> int:
        states = [optimizer.state.get(member.parameter, {}) for member in shards.members]
        return sum(value.nbytes for values in states for value in values.values() if isinstance(value, torch.Tensor))


def shard_of_value(member: Member, part: Part, value: Any) -> Any:
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


def move_state_to(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, shard: torch.Tensor) -> None:
    """Move loaded state to the device of the shard."""
    group = group_of(optimizer, parameter)
    values = optimizer.state.get(parameter, {})
    values.update({name: moved(name, value, group, shard) for name, value in values.items()})


def to_host(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def full_state(member: Member, of_ranks: Sequence[tuple[Part, dict[str, Any]]], whole_values: frozenset[str]) -> dict[str, Any]:
    """Return the full state of a parameter. Values by element are joined from all shards; others are the first rank's."""
    of_ranks = [(part, values) for part, values in of_ranks if values]
    if not of_ranks:
        return {}
    state = {}
    for name, value in of_ranks[0][1].items():
        by_element = name not in whole_values and all(
            isinstance(values.get(name), torch.Tensor) and values[name].shape == shape_of(member, part[1])
            for part, values in of_ranks
        )
        if by_element:
            full = torch.zeros(member.parameter.numel(), dtype=value.dtype, device="cpu")
            for (first, count), values in of_ranks:
                full[first : first + count] = values[name].view(-1)
            value = full.view(member.parameter.shape)
        state[name] = value
    return state
