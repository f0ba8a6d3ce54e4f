"""The shards of a training that belong to each fragment, and the state of the outer optimizer for them, in any tier.

Hosts exchange shards without a look at the parameters, so all hosts have the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.checks import refuse, refuse_order
from ballast.outer.fragments import fragments_of, part_of_rank
from ballast.outer.hosts import HostGroup
from ballast.outer.memory import PIECE, model_of_shard
from ballast.outer.options import DiLoCo
from ballast.ranks import Group, connect
from ballast.torch.gpu import in_stream, stream_on
from ballast.torch.memory import tensor_at, tensor_of
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.process_groups import broadcast
from ballast.torch.updates.sharded_state import Rule, ShardedState


@dataclass(frozen=True)
class Span:
    """This rank's elements of one parameter, and their position in the fragment's shard."""

    first: int  # of the parameter's elements
    count: int
    offset: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return these elements of the fragment's shard."""
        return values[self.offset : self.offset + self.count]


def part_of(values: torch.Tensor, momentum: torch.Tensor | None = None) -> _core.StatePart:
    """Show values in fp32 to the library. The caller keeps them alive."""
    at = 0 if momentum is None else momentum.data_ptr()
    return _core.StatePart(dtype=_core.DType.fp32, parameter=values.data_ptr(), momentum=at, count=values.numel())


def rule_of(options: DiLoCo) -> Rule:
    if options.momentum == 0:
        return _core.Sgd(lr=float(options.lr), weight_decay=0.0)
    return _core.SgdMomentum(
        lr=float(options.lr),
        momentum=float(options.momentum),
        dampening=0.0,
        weight_decay=0.0,
        nesterov=options.nesterov,
    )


class FragmentState:
    """A training of this rank alone, with the outer optimizer's rule, of the shard of one fragment. The shard is cut into
    pieces. They are updated one by one, as the units of a model are in a backward pass that updates."""

    def __init__(self, values: torch.Tensor, options: DiLoCo, *, name: str, gpu: int | None, threads: int):
        """Begin with these values of the outer copy, without momentum. `gpu` is that of the training, if it has one."""
        self.count = values.numel()
        self.has_momentum = options.momentum > 0
        self._rule = rule_of(options)
        self._gpu = gpu if options.tier == "device" else None  # state in other tiers is updated by the CPU
        self._stream = stream_on(self._gpu)
        model = model_of_shard(name, self.count)
        self._core = _core.Training(
            model=model,
            group=connect(rank=0, size=1)._core,
            norm_group=None,
            rules=[self._rule],
            options=self._options(options, len(model.units), threads),
        )

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            begin = unit * PIECE + first
            tensor_at(into, count, torch.float32).copy_(values[begin : begin + count])
            return True

        self._core.start(fill)

    def _options(self, outer: DiLoCo, units: int, threads: int) -> _core.TrainingOptions:
        options = _core.TrainingOptions()
        options.stage = 3  # so that parameters too are where the options say
        options.format = _core.StateFormat.fp32
        options.gradient_format = _core.GradientFormat.fp32
        options.threads = threads
        options.gpu, options.stream = self._gpu, self._stream
        options.update_in_backward = True  # no gradients are kept
        options.backward_order = [*range(units)]
        if outer.tier == "nvme":
            options.parameters = options.state = _core.Spread(nvme=1.0)
            options.directories = [outer.directory]
        return options

    def _parts(self, part: _core.StatePart) -> slice:
        begin = part.unit * PIECE + part.first
        return slice(begin, begin + part.count)

    def subtract(self, values: torch.Tensor) -> None:
        """Replace parameters by the differences between the outer copy and them."""
        outer = torch.empty(min(PIECE, self.count), dtype=torch.float32, device="cpu")

        def look(part: _core.StatePart) -> None:
            copy, mine = outer[: part.count], values[self._parts(part)]
            part_of(copy).copy_from(part)
            torch.sub(copy, mine, out=mine)

        self._core.visit_shards(look)

    def read(self, values: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        """Copy the outer copy into `values`, and the momentum into `momentum`."""

        def look(part: _core.StatePart) -> None:
            where = self._parts(part)
            part_of(values[where], None if momentum is None else momentum[where]).copy_from(part)

        self._core.visit_shards(look)

    def write(self, values: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        """Replace the outer copy and the momentum, which becomes zero without `momentum`."""

        def change(part: _core.StatePart) -> None:
            where = self._parts(part)
            part.copy_from(part_of(values[where], None if momentum is None else momentum[where]))

        self._core.change_shards(change, lambda: None)

    def step(self, gradients: torch.Tensor) -> None:
        """Update the outer copy and the momentum with these gradients."""
        with in_stream(self._gpu, self._stream):
            self._core.prepare(rules=[self._rule], missed=[])
            for number, gradient in enumerate(gradients.split(PIECE)):
                memory = self._core.acquire_gradients(number)
                try:
                    tensor_of(memory, torch.float32, 0, gradient.numel()).copy_(gradient)
                finally:
                    self._core.release()
            self._core.step_prepared()
            self._core.finish()

    def offload(self) -> None:
        """Free the GPU's memory, if the state is there."""
        if self._gpu is not None:
            self._core.offload(parameters=True, agree=lambda failed: None)

    def reload(self) -> None:
        if self._gpu is not None:
            with in_stream(self._gpu, self._stream):
                self._core.reload(agree=lambda failed: None)

    @property
    def bytes(self) -> int:
        """The bytes of the outer copy and of the momentum."""
        return int((8 if self.has_momentum else 4) * self.count)

    def ledger(self) -> str:
        return self._core.ledger((_core.Tier.host, 0))


class Fragment:
    """This rank's shard of a fragment, and the state of the outer optimizer for it. A rank may have no elements of it."""

    def __init__(self, number: int):
        self.number = number
        self.spans: dict[int, Span] = {}  # by id of the parameter
        self.elements = 0
        self.state: FragmentState | None = None  # None: there are no elements
        self.exchanged_at = 0  # the step of its last exchange; 0: there was none

    def add(self, member: UnitParameter, first: int, count: int) -> None:
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
    rows = hosts.rows([_core.checksum(repr(shards).encode()) >> 2, training.stage, len(training.units)])
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
