"""What each rank keeps of a training, taken out of one partition and into the next one: parameters, with what they were rounded
from, and moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.checks import refuse_order
from ballast.wrapper.collectives import sum_in_fp32
from ballast.wrapper.deferred_params import DeferredParameters, is_pending, lose, suspend
from ballast.wrapper.managed_parameter import is_without_values, managed
from ballast.wrapper.memory import return_freed_memory
from ballast.wrapper.partition import Partition
from ballast.wrapper.updates import State

Kind = _core.Moment | None  # None: the parameter itself


@dataclass(frozen=True)
class Shard:
    """Of a parameter's elements."""

    first: int
    count: int
    numbers: Mapping[Kind, torch.Tensor]  # in fp32

    @staticmethod
    def read(part: _core.StatePart, kinds: Iterable[Kind]) -> Shard:
        stretch = Shard(part.first, part.count, {kind: torch.empty(part.count) for kind in kinds})
        stretch.part(part.first, part.count).copy_from(part)
        return stretch

    def has(self, element: int) -> bool:
        return self.first <= element < self.first + self.count

    def completed(self, part: _core.StatePart) -> Shard:
        """With the parameter as it is there, where this has moments alone."""
        if None in self.numbers:
            return self
        begin = part.first - self.first
        moments = {kind: numbers[begin : begin + part.count] for kind, numbers in self.numbers.items()}
        return Shard(part.first, part.count, {**Shard.read(part, [None]).numbers, **moments})

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


@dataclass
class TakenParameter:
    """Of one parameter. Of which kinds there are numbers is the same on all ranks, and each has its own part."""

    parameter: torch.nn.Parameter
    kinds: list[Kind]
    stretches: list[Shard]
    version: int = 0  # torch's, of what is in its memory

    def keep(self, kinds: Iterable[Kind]) -> None:
        """These, and forget others."""
        self.kinds = [*kinds]
        self.stretches = [
            Shard(each.first, each.count, {kind: each.numbers[kind] for kind in self.kinds}) for each in self.stretches
        ]


class StateMigration:
    """Of what there was in a partition, or of nothing: a rank has its own, and all of one tensor at a time. All ranks do all of
    this together. Where parameters were partitioned nobody else has their numbers: torch is sent to `awaited` for them, until
    they are handed over."""

    def __init__(
        self,
        partition: Partition | None = None,
        moments: Sequence[tuple[_core.Moment, str]] = (),
        awaited: DeferredParameters | None = None,
    ):
        self._sharing = None if partition is None else partition.sharing
        self._names = dict(moments)
        self._awaited = awaited
        self._is_torn = False
        self._of: dict[int, TakenParameter] = {}  # by id of the parameter
        if partition is not None:
            self._take(partition)

    def _take(self, partition: Partition) -> None:
        for member in partition.all_members:
            kinds: list[Kind] = [None] if member.group is None else [None, *self._names]
            self._of[id(member.parameter)] = TakenParameter(member.parameter, kinds, [])

        def take(part: _core.StatePart) -> None:
            taken = self._of[id(partition.member_of(part).parameter)]
            taken.stretches.append(Shard.read(part, taken.kinds))

        partition.look_at_parts(take)

    def let_come(self) -> None:
        """Their partition is gone, or the next one could not be made."""
        for taken in self._of.values():
            if self._awaited is not None and None in taken.kinds:
                suspend(taken.parameter, self._awaited)
            taken.version = taken.parameter._version

    def _is_written(self, taken: TakenParameter) -> bool:
        """Since then, or read from files, which counts."""
        if self._awaited is not None:
            return not is_pending(taken.parameter)
        return bool(taken.parameter._version != taken.version)

    def forget_moments(self) -> None:
        for taken in self._of.values():
            taken.keep(kind for kind in taken.kinds if kind is None)

    def begin_again(self) -> None:
        """With a checkpoint, which has what was lost, and all moments."""
        if self._is_torn:
            self._of, self._is_torn = {}, False
        self.forget_moments()

    def take_moments(self, *, but_of: Collection[int]) -> State:
        """Of parameters with other ids than these, whole. They are trained no more: of them nothing else is kept, but where
        nobody else has their numbers."""
        state: State = {}
        left = {key: taken for key, taken in self._of.items() if key not in but_of}
        for key, taken in left.items():
            state[key] = {name: self._whole(taken, kind) for kind, name in self._names.items() if kind in taken.kinds}
        for key, taken in left.items():
            taken.keep(kind for kind in taken.kinds if kind is None)
            if self._awaited is None:
                del self._of[key]
        return state

    # --- To whom they go ---

    def hand_over(self, make: Callable[[], Partition]) -> Partition:
        """To the partition that is made, before other state is: what this has none of becomes zero there. What is in no
        partition any more is torch's again."""
        if self._is_torn:
            refuse_order(
                "cannot continue to train: values were lost on the way from one plan to another",
                needed="ballast.load_checkpoint(), after the cause of the failure is removed",
            )
        for taken in self._of.values():
            if self._is_written(taken):
                taken.keep(kind for kind in taken.kinds if kind is not None)
        try:
            partition = make()
        except BaseException:
            self.let_come()
            raise
        try:
            self._give(partition)
            self.give_back()
        except BaseException:
            self._is_torn = True
            partition.release(together=False)
            self._lose([member.parameter for member in partition.all_members])
            raise
        return partition

    def _give(self, partition: Partition) -> None:
        members = {id(member.parameter): member for member in partition.all_members if id(member.parameter) in self._of}
        own = {key: self._cut(self._of[key], *partition.part(member)) for key, member in members.items()}

        def change(part: _core.StatePart) -> None:
            stretch = own.get(id(partition.member_of(part).parameter))
            if stretch is not None and stretch.has(part.first):
                completed = stretch.completed(part)  # which has to last
                part.copy_from(completed.part(part.first, part.count))

        if own:  # as on all ranks
            partition.change_parts(change, partition.steps, lambda: None)
        self._of = {key: taken for key, taken in self._of.items() if key not in own}

    def _cut(self, taken: TakenParameter, first: int, count: int) -> Shard:
        """For another partition."""
        numbers = {kind: self._whole(taken, kind).view(-1)[first : first + count].clone() for kind in taken.kinds}
        taken.stretches = []
        return_freed_memory()  # small blocks and large ones in turn leave holes in the heap
        return Shard(first, count, numbers)

    def _lose(self, partitioned: list[torch.nn.Parameter]) -> None:
        if self._awaited is not None:
            left = [taken.parameter for taken in self._of.values() if is_without_values(taken.parameter)]
            for parameter in partitioned + left:
                lose(parameter, self._awaited)

    def give_back(self) -> None:
        """What is left is torch's again, if it was not all the time."""
        if self._awaited is None or self._is_torn:
            return
        for taken in self._of.values():
            if None not in taken.kinds:
                continue
            parameter = taken.parameter
            whole = self._whole(taken, None).to(parameter.device, parameter.dtype)
            found = managed(parameter)
            assert found is not None
            found.release(whole)
        self._of = {}

    def _whole(self, taken: TakenParameter, kind: Kind) -> torch.Tensor:
        """Zeros below zero change nothing that they are added to, zeros above it would."""
        mine = torch.full((taken.parameter.numel(),), -0.0)
        for stretch in taken.stretches:
            mine[stretch.first : stretch.first + stretch.count] = stretch.numbers[kind]
        return sum_in_fp32(self._sharing, mine).view(taken.parameter.shape)

    # --- To be seen meanwhile ---

    def shown(self) -> State:
        """Moments as optimizer.state has them: whole where this rank has all of them, else its part, one-dimensional."""
        return {
            key: {name: _shown(taken, kind) for kind, name in self._names.items() if kind in taken.kinds}
            for key, taken in self._of.items()
        }


def _shown(taken: TakenParameter, moment: _core.Moment) -> torch.Tensor:
    own = torch.cat([torch.empty(0), *(stretch.numbers[moment] for stretch in taken.stretches)])
    return own.view(taken.parameter.shape) if own.numel() == taken.parameter.numel() else own
