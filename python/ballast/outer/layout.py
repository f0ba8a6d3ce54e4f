"""The shards of a training that belong to each fragment. Hosts exchange them without a look at the parameters, so all hosts
have the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ballast import _core
from ballast.checks import refuse, refuse_order
from ballast.connecting import Group
from ballast.outer.fragments import fragments_of, part_of_rank
from ballast.outer.host_group import HostGroup
from ballast.outer.state import FragmentState, Span, part_of
from ballast.torch.collectives import broadcast
from ballast.torch.parameters.units import Member
from ballast.torch.updates.sharded_state import ShardedState


class Fragment:
    """This rank's shard of a fragment, and the state of the outer optimizer for it. A rank may have no elements of it."""

    def __init__(self, number: int):
        self.number = number
        self.spans: dict[int, Span] = {}  # by id of the parameter
        self.elements = 0
        self.state: FragmentState | None = None  # None: there are no elements
        self.exchanged_at = 0  # the step of its last exchange; 0: there was none

    def add(self, member: Member, first: int, count: int) -> None:
        """Add a parameter, of which this rank may have no elements."""
        self.spans[id(member.parameter)] = Span(first, count, self.elements)
        self.elements += count

    def read(self, training: ShardedState) -> torch.Tensor:
        """Return this rank's shard, as the fp32 values from which parameters are rounded."""
        values = torch.empty(self.elements, dtype=torch.float32, device="cpu")

        def look(part: _core.StatePart) -> None:
            for there in self._slices_in(training, part):
                part_of(values[there]).copy_from(part)

        training.visit_shards(look)
        return values

    def write(self, training: ShardedState, values: torch.Tensor) -> None:
        """Replace this rank's shard of the parameters. Other state of the optimizer stays."""

        def change(part: _core.StatePart) -> None:
            for there in self._slices_in(training, part):
                part.copy_parameter_from(part_of(values[there]))

        training.change_shards(change, training.steps, lambda: None)

    def state_values(self) -> list[torch.Tensor]:
        """Return the outer copy of this rank's shard, and the momentum if there is one."""
        if self.state is None:
            return []
        count = 2 if self.state.has_momentum else 1
        values = [torch.empty(self.elements, dtype=torch.float32, device="cpu") for _ in range(count)]
        self.state.read(*values)
        return values

    def _slices_in(self, training: ShardedState, part: _core.StatePart) -> Iterator[slice]:
        """Yield the position of a part of the training in the fragment's shard, if it is in the fragment."""
        span = None if part.frozen else self.spans.get(id(training.member_of(part).parameter))
        if span is not None:
            begin = span.offset + part.first - span.first
            yield slice(begin, begin + part.count)


class DividedFragment(Fragment):
    """The same in stage 0, where each rank of a host has all parameters: the ranks divide the fragment. So no element is
    exchanged by several ranks, which might lose a host in different exchanges and continue with different values."""

    def __init__(self, whole: Fragment, ranks: Group):
        super().__init__(whole.number)
        self._whole, self._ranks = whole, ranks
        mine = self._part(ranks.rank)
        for key, span in whole.spans.items():
            first = min(max(mine.start, span.offset), span.offset + span.count)
            end = min(max(mine.stop, span.offset), span.offset + span.count)
            self.spans[key] = Span(first - span.offset, end - first, self.elements)
            self.elements += end - first

    def _part(self, rank: int) -> slice:
        return part_of_rank(self._whole.elements, rank, self._ranks.size)

    def read(self, training: ShardedState) -> torch.Tensor:
        return self._whole.read(training)[self._part(self._ranks.rank)].clone()

    def write(self, training: ShardedState, values: torch.Tensor) -> None:
        """Gather the parts of all ranks, and replace the parameters."""
        whole = torch.empty(self._whole.elements, dtype=torch.float32, device="cpu")
        whole[self._part(self._ranks.rank)] = values
        for rank in range(self._ranks.size):
            broadcast(self._ranks, whole[self._part(rank)], root=rank)
        self._whole.write(training, whole)


def cut(training: ShardedState, fragments: int) -> list[Fragment]:
    """Cut the parameters into fragments, without state. The fragment of a parameter depends on the parameters alone, so it is
    the same in every stage."""
    members = sorted(training.members, key=lambda member: -1 if member.number is None else member.number)
    made = [Fragment(number) for number in range(fragments)]
    for number, member in zip(fragments_of([member.parameter.numel() for member in members], fragments), members):
        made[number].add(member, *training.part(member))
    is_divided = training.stage == 0 and training.ranks.size > 1
    return [DividedFragment(whole, training.ranks) for whole in made] if is_divided else made


def require_same_on_hosts(hosts: HostGroup, training: ShardedState) -> None:
    """Refuse hosts whose ranks have other shards than the same ranks of the other hosts. All ranks of all hosts call it."""
    shards = [(member.name, tuple(member.parameter.shape), *training.part(member)) for member in training.members]
    rows = hosts.rows([_core.checksum(repr(shards).encode()) >> 2, training.stage, training.units])
    if is_so_on_a_rank(training, any(row[0] != rows[0][0] for row in rows)):
        refuse(
            "cannot train with outer=: the hosts have divided the parameters in different ways",
            where="; ".join(
                f"{hosts.own.describe(host)}: stage {stage}, {units} units"
                for host, (_, stage, units) in zip(hosts.members, rows)
            ),
            needed="the same model, stage and units on all hosts",
            remedy="Set stage= of ballast.wrap() to a number, and units= to the same list.",
        )


def require_same_cut(training: ShardedState, fragments: Sequence[Fragment]) -> None:
    """Refuse a training with other shards than those of which the outer optimizer has state. All ranks of a host call it."""
    now = cut(training, len(fragments))
    if is_so_on_a_rank(training, any(mine.spans != before.spans for mine, before in zip(now, fragments))):
        refuse_order(
            "cannot continue to train: the stage or the units have changed, and the outer optimizer has shards of before",
            needed="the same stage and units",
            remedy="Set stage= of ballast.wrap() to a number; or load a checkpoint, which has the outer optimizer too.",
        )


def is_so_on_a_rank(training: ShardedState, mine: bool) -> bool:
    """Return whether it is so on any rank of the host, so that all ranks raise the same error."""
    [ranks] = training.ranks.all_reduce([int(mine)])
    return ranks > 0
