"""Updates by a rule of the library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ballast import _core
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.updates.commit_metadata import decode_missed_steps, encode_missed_steps, join_missed_steps
from ballast.torch.updates.rules import Group, MakeRule, Rule
from ballast.torch.updates.sharded_state import ShardedState
from ballast.torch.updates.shown_state import IN_LIBRARY, LazyState, ShownState, changed_state, lazy_moment, moments_in
from ballast.torch.updates.updates import State, Updates

MOMENTS = (_core.Moment.momentum, _core.Moment.variance)


class RuleUpdates(Updates):
    """Updates by a rule of the library, which keeps up to two moments of each parameter, and counts steps."""

    has_custom_step = False

    def __init__(self, make_rule: MakeRule):
        self._make_rule = make_rule
        self._shown = ShownState()
        self._given: set[int] = set()  # ids of parameters whose state was loaded

    def rule(self, group: Group) -> Rule:
        return self._make_rule(group)

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        rule = self.rule(optimizer.param_groups[0])
        return [(moment, name) for moment, name in zip(MOMENTS, _core.state_names(rule)) if name]

    def begin(self, optimizer: torch.optim.Optimizer, shards: ShardedState, state: State) -> None:
        names = self.moments(optimizer)
        if moments := moments_in(state, shards, names):
            shards.write_moments(moments)
        has_state_at_once = isinstance(self.rule(optimizer.param_groups[0]), _core.Adagrad)  # torch makes it with the optimizer
        self._given = {id(each.parameter) for each in shards.members if has_state_at_once or state.get(id(each.parameter))}
        for member in shards.members:
            values = {
                "step": LazyState((), f"{member.name}, step", partial(steps_of, shards, member)),
                **{name: lazy_moment(shards, member, moment, name) for moment, name in names},
            }
            self._shown.show(optimizer, member.parameter, values)

    def unbegun(self, shards: ShardedState) -> list[torch.nn.Parameter]:
        return [member.parameter for member in shards.members if not self._has_begun(shards, member)]

    def _has_begun(self, shards: ShardedState, member: UnitParameter) -> bool:
        return shards.steps > member.missed or id(member.parameter) in self._given

    def changed_state(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> State | None:
        if self._shown.is_as_shown(optimizer, shards.members):
            return None
        return changed_state(optimizer, shards, shards.members)

    def take_out(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> State:
        kept_here = {name: IN_LIBRARY for _, name in self.moments(optimizer)}
        begun = [member for member in shards.members if self._has_begun(shards, member)]
        return {id(member.parameter): {"step": steps_of(shards, member), **kept_here} for member in begun}

    def keep_metadata(self, shards: ShardedState, state: State) -> None:
        if shards.keeps_run:
            shards.core.set_note(encode_missed_steps(shards.members))

    def resume_metadata(self, shards: ShardedState) -> None:
        counts = decode_missed_steps(shards.core.note(), shards.steps) or [0] * len(shards.members)
        for member, missed in zip(shards.members, counts):
            member.missed = missed

    def join_metadata(self, metadata: Sequence[bytes], places: Sequence[int]) -> bytes:
        return join_missed_steps(metadata, places)

    def forget_partition(self) -> None:
        self._shown = ShownState()


def steps_of(shards: ShardedState, member: UnitParameter) -> torch.Tensor:
    """Return the count of steps of a parameter, in the form in which torch keeps it."""
    return torch.tensor(float(shards.steps - member.missed), dtype=torch.float32, device="cpu")
