"""What each rank keeps of a training, taken out of one partition and into the next one: what parameters were rounded from, and
moments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.wrapper.everybody import sum_in_fp32
from ballast.wrapper.partition import Partition
from ballast.wrapper.units import Member
from ballast.wrapper.updates import State

Kind = _core.Moment | None  # None: the parameter itself


@dataclass(frozen=True)
class Stretch:
    """Of a parameter's elements."""

    first: int
    numbers: Mapping[Kind, torch.Tensor]  # in fp32

    @property
    def count(self) -> int:
        return len(self.numbers[None])

    def part(self, first: int, count: int) -> _core.StatePart:
        def address(kind: Kind) -> int:
            return self.numbers[kind][first - self.first :].data_ptr() if kind in self.numbers else 0

        return _core.StatePart(
            dtype=_core.DType.fp32,
            parameter=address(None),
            momentum=address(_core.Moment.momentum),
            variance=address(_core.Moment.variance),
            count=count,
        )


class OwnParts:
    """Of what was trained, or of nothing: a rank has its own, and all of one tensor at a time. All ranks do all of this
    together."""

    def __init__(self, partition: Partition | None = None, moments: Sequence[tuple[_core.Moment, str]] = ()):
        self._sharing = None if partition is None else partition.sharing
        self._moments = dict(moments)
        members = [] if partition is None else partition.members
        self._shapes = {id(member.parameter): member.parameter.shape for member in members}
        self._stretches: dict[int, list[Stretch]] = {key: [] for key in self._shapes}  # by id of the parameter
        if partition is not None:
            partition.look_at_parts(lambda part: self._keep(partition.member_of(part), part))

    def _keep(self, member: Member, part: _core.StatePart) -> None:
        if not part.frozen:
            stretch = Stretch(part.first, {kind: torch.empty(part.count) for kind in (None, *self._moments)})
            stretch.part(part.first, part.count).copy_from(part)
            self._stretches[id(member.parameter)].append(stretch)

    def forget_moments(self) -> None:
        self._moments = {}

    def take_moments(self, *, but_of: Collection[int]) -> State:
        """Of parameters with other ids than these, whole; nothing else of them is kept."""
        taken: State = {}
        for key in [key for key in self._stretches if key not in but_of]:
            taken[key] = {name: self._whole(key, moment) for moment, name in self._moments.items()}
            del self._stretches[key]
        return taken

    def give(self, partition: Partition) -> None:
        """Before other state is: what this has none of becomes zero."""
        members = [member for member in partition.members if id(member.parameter) in self._stretches]
        own = {id(member.parameter): self._cut(member, partition) for member in members}

        def change(part: _core.StatePart) -> None:
            for stretch in own.get(id(partition.member_of(part).parameter), []):
                if stretch.first <= part.first < stretch.first + stretch.count:
                    part.copy_from(stretch.part(part.first, part.count))

        if own:  # as on all ranks
            partition.change_parts(change, partition.steps, lambda: None)

    def _cut(self, member: Member, partition: Partition) -> list[Stretch]:
        """For another partition."""
        key, parts = id(member.parameter), partition.parts(member.parameter)
        numbers: list[dict[Kind, torch.Tensor]] = [{} for _ in parts]
        for kind in (None, *self._moments):
            whole = self._whole(key, kind).view(-1)
            for into, (first, count) in zip(numbers, parts):
                into[kind] = whole[first : first + count].clone()
        del self._stretches[key]
        return [Stretch(first, each) for (first, _), each in zip(parts, numbers)]

    def _whole(self, key: int, kind: Kind) -> torch.Tensor:
        """Zeros below zero change nothing that they are added to, zeros above it would."""
        mine = torch.full((self._shapes[key].numel(),), -0.0)
        for stretch in self._stretches[key]:
            mine[stretch.first : stretch.first + stretch.count] = stretch.numbers[kind]
        return sum_in_fp32(self._sharing, mine).view(self._shapes[key])

    def shown(self) -> State:
        """Moments as optimizer.state has them: whole where this rank has all of them, else its part, one-dimensional."""
        return {key: {name: self._shown(key, kind) for kind, name in self._moments.items()} for key in self._stretches}

    def _shown(self, key: int, moment: _core.Moment) -> torch.Tensor:
        own = torch.cat([torch.empty(0), *(stretch.numbers[moment] for stretch in self._stretches[key])])
        return own.view(self._shapes[key]) if own.numel() == self._shapes[key].numel() else own
