"""Optimizers without a rule of the library, whose state it keeps all the same: in any tier, drives too. Their own step runs
on this rank's shard, tile by tile where state is on drives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.wrapper.collectives import from_all_ranks
from ballast.wrapper.kept_state import IN_LIBRARY, lazy_moment, left_of_state, moments_in
from ballast.wrapper.memory import tensor_of
from ballast.wrapper.own_numbers import Numbers, copied, decoded, encoded
from ballast.wrapper.own_step import OwnStep, Piece, shape_of
from ballast.wrapper.rules import Group, Rule
from ballast.wrapper.sharded_state import ShardedState
from ballast.wrapper.trial_step import values_of_each_element
from ballast.wrapper.units import TORCH_DTYPES, Member
from ballast.wrapper.updates import State, StepTurn


@dataclass
class StoredPiece(Piece):
    """A piece whose values of each element are in the library's memory."""

    member: Member
    values: Mapping[str, torch.Tensor]

    def take_back(self) -> Numbers:
        """Keep the values of each element that the step has made, and return the state without them."""
        numbers: Numbers = {}
        for key, value in self.state.items():
            kept = self.values.get(key)
            if kept is None:
                require_number(self.member.name, key, value, self.masters.shape)
                numbers[key] = value
                continue
            if value.data_ptr() != kept.data_ptr():
                kept.copy_(value)
            numbers[key] = IN_LIBRARY
        return numbers


class StoredUpdates:
    """Updates by the optimizer's own step. The library keeps the values of each element, and optimizer.state shows them
    beside the numbers: other values, such as a count of steps."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._step = OwnStep(type(optimizer))
        self._names = values_of_each_element(optimizer)
        self._begun: set[int] = set()  # ids of parameters that have state
        self._new: dict[int, tuple[Member, Numbers]] = {}  # by id of the parameter, until the training step ends

    def rule(self, group: Group) -> Rule:
        return _core.External(own_values=len(self._names))

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        return [(_core.Moment[f"own_{number}"], name) for number, name in enumerate(self._names)]

    # --- A step ---

    def own_step(self, optimizer: torch.optim.Optimizer, kept: ShardedState, turn: StepTurn) -> None:
        """Update tiles between the library's sum of gradients and its use of the new parameters."""
        pieces = [piece for tile in turn.tiles for piece in self._pieces(optimizer, kept, tile, turn.factor)]
        self._step.run(optimizer, pieces, is_last=turn.is_last)
        for piece in pieces:
            self._new[id(piece.parameter)] = piece.member, piece.take_back()
        if turn.is_last:
            for member, numbers in self._new.values():
                self._show(optimizer, kept, member, numbers)
            self._new = {}
            self._note(optimizer, kept)

    def _pieces(
        self, optimizer: torch.optim.Optimizer, kept: ShardedState, tile: _core.TileToUpdate, factor: float
    ) -> Iterator[StoredPiece]:
        gradients = tensor_of(tile.gradients, TORCH_DTYPES[tile.gradient_dtype]).float().mul_(factor)
        masters = tensor_of(tile.masters, torch.float32)
        values = [tensor_of(each, torch.float32) for each in tile.own]
        for member, _, begin, count in kept.in_tile(tile):
            shape = shape_of(member, count)
            part = torch.nn.Parameter(masters[begin:][:count].view(shape))
            part.grad = gradients[begin:][:count].view(shape).to(part.device)
            own = {name: each[begin:][:count].view(shape) for name, each in zip(self._names, values)}
            shown = optimizer.state[member.parameter] if id(member.parameter) in self._begun else {}
            state = {name: own[name] if name in own else copied(value) for name, value in shown.items()}
            yield StoredPiece(member.parameter, part, state, member, own)

    def _show(self, optimizer: torch.optim.Optimizer, kept: ShardedState, member: Member, numbers: Numbers) -> None:
        moments = {name: moment for moment, name in self.moments(optimizer)}
        self._begun.add(id(member.parameter))
        optimizer.state[member.parameter] = {
            name: lazy_moment(kept, member, moments[name], name) if name in moments else value
            for name, value in numbers.items()
        }

    def _numbers(self, optimizer: torch.optim.Optimizer, member: Member) -> Numbers:
        if id(member.parameter) not in self._begun:
            return {}
        shown = optimizer.state[member.parameter]
        return {name: IN_LIBRARY if name in self._names else value for name, value in shown.items()}

    def _note(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> None:
        """Keep the numbers with the state in the next commits of a run."""
        if kept.keeps_run:
            kept.set_note(encoded([self._numbers(optimizer, member) for member in kept.members]))

    # --- State ---

    def begin(self, optimizer: torch.optim.Optimizer, kept: ShardedState, state: State) -> None:
        for member in kept.members:
            for name, value in state.get(id(member.parameter), {}).items():
                if name not in self._names:
                    require_number(member.name, name, value, member.parameter.shape)
        if kept.found and kept.note:
            found = zip(kept.members, decoded(kept.note))
            state = {**{id(member.parameter): numbers for member, numbers in found if numbers}, **state}
        self.install(optimizer, kept, state)
        if moments := moments_in(state, kept, self.moments(optimizer)):
            kept.write_moments(moments)

    def install(self, optimizer: torch.optim.Optimizer, kept: ShardedState, state: State) -> None:
        self._begun = set()
        for member in kept.members:
            numbers = state.get(id(member.parameter))
            if numbers and kept.part(member)[1] > 0:
                self._show(optimizer, kept, member, numbers)
            else:
                optimizer.state.pop(member.parameter, None)
        self._note(optimizer, kept)

    def left_of_state(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State | None:
        return left_of_state(optimizer, kept, [member for member in kept.members if id(member.parameter) in self._begun])

    def take_out(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State:
        """Return the numbers. A rank has those of parameters of which it has elements, and may get others."""
        of_all = from_all_ranks(kept.ranks, [self._numbers(optimizer, member) for member in kept.members])
        found = zip(kept.members, zip(*of_all))
        return {id(member.parameter): next(filter(None, of_ranks), {}) for member, of_ranks in found}

    def forget_partition(self) -> None:
        self._begun, self._new = set(), {}

    def offload(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def state_bytes(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> int:
        numbers = (value for member in kept.members for value in self._numbers(optimizer, member).values())
        return sum(value.nbytes for value in numbers if isinstance(value, torch.Tensor))


def require_number(parameter: str, name: str, value: Any, shape: torch.Size) -> None:
    """Refuse state of each element that the library does not keep."""
    if isinstance(value, torch.Tensor) and value.shape == shape and value.numel() > 1:
        refuse(
            f"the optimizer's state has {name}, which two steps on a few elements did not make",
            where=f"parameter {parameter}",
            needed="the same values of each element as in the first two steps: the library keeps room for those",
            remedy='Keep the state in memory: offload={"state": "host"}, or none.',
        )
