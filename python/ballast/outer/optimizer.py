"""The outer optimizer: it cuts the parameters into fragments, keeps its state of them in any tier, and exchanges them with the
other hosts, between the steps of this one. Hosts exchange shards without a look at the parameters, so all hosts have the same
layout."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.checks import refuse, refuse_order
from ballast.errors import FailureError
from ballast.outer.fragments import PIECE, due_at, fragments_of, model_of_shard, part_of_rank, set_training_of_shard
from ballast.outer.hosts import HostGroup
from ballast.outer.options import DiLoCo
from ballast.ranks import Group, connect
from ballast.torch.gpu import in_stream, stream_on
from ballast.torch.memory import tensor_at, tensor_of
from ballast.torch.parameters.units import UnitParameter, gpu_of
from ballast.torch.process_groups import broadcast
from ballast.torch.updates.sharded_state import Rule, ShardedState


@dataclass(frozen=True)
class Span:
    """This rank's elements of one parameter, and their position in the fragment's shard."""

    first: int  # the number of the first one in the parameter
    count: int
    offset: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
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
            group=connect(rank=0, size=1),
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
        set_training_of_shard(options, units)
        options.threads = threads
        options.gpu, options.stream = self._gpu, self._stream
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
        return int((8 if self.has_momentum else 4) * self.count)

    def ledger(self) -> str:
        return self._core.ledger((_core.Tier.host, 0))


class Fragment:
    """This rank's shard of a fragment, and the state of the outer optimizer for it. A rank may have no elements of it."""

    def __init__(self, number: int):
        self.number = number
        self.spans: dict[int, Span] = {}  # keys: ids of parameters
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
            remedy="Set stage= of ballast.wrap() to a number, and units= of ballast.Tuning() to the same list.",
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


IDENTITY_BITS = 62  # sums of the library's integers have 64, with a sign


class OuterOptimizer:
    """All ranks of all hosts call all methods together, except for reports, offload(), reload() and close()."""

    def __init__(self, hosts: HostGroup, options: DiLoCo, threads: int):
        self.hosts = hosts
        self.options = options
        self._threads = threads
        self.fragments: list[Fragment] = []
        self._training: weakref.ref[ShardedState] | None = None  # the state whose shards the fragments have
        self._is_compared = True  # whether hosts have compared the state that they have loaded
        self._gpu: int | None = None
        self.identity = ""  # names the training: the same on all hosts and in all its checkpoints
        self._exchanges = 0  # exchanges that this host has completed
        self._last = 0.0  # seconds of the last exchange

    # --- The beginning ---

    @property
    def has_begun(self) -> bool:
        return bool(self.fragments)

    def begin(self, training: ShardedState) -> None:
        """Begin with the parameters of the first host, if this has not begun yet."""
        if not self.has_begun:
            self._begin_with_parameters(training)
            return
        if self._training is None or self._training() is not training:
            require_same_cut(training, self.fragments)
            self._training = weakref.ref(training)
        if not self._is_compared:
            self._require_same_state(training)
            if not self.identity:
                self._draw_identity(training)
            self._is_compared = True

    def _begin_with_parameters(self, training: ShardedState) -> None:
        self._cut(training)
        for fragment in self.fragments:
            values = fragment.read(training)
            if is_so_on_a_rank(training, self._differs(values)):
                self.hosts.broadcast(values)
                fragment.write(training, values)
            self.make_state(fragment, values)
        self._draw_identity(training)

    def _draw_identity(self, training: ShardedState) -> None:
        is_first = self.hosts.rank == 0 and training.ranks.rank == 0
        first_words = self.hosts.rows([secrets.randbits(IDENTITY_BITS) if is_first else 0])[0]
        [identity] = training.ranks.all_reduce(first_words)  # the others have 0
        self.identity = f"{identity:016x}"

    def begin_to_load(self, training: ShardedState, identity: str) -> None:
        """Cut the parameters into fragments. The caller makes their state. Hosts compare it in the next begin(). The identity
        is empty in a checkpoint of an older version."""
        self._cut(training)
        self.identity = identity
        self._is_compared = False

    def _cut(self, training: ShardedState) -> None:
        require_same_on_hosts(self.hosts, training)
        self._gpu = gpu_of(training.members)
        self.fragments, self._training = cut(training, self.options.fragments), weakref.ref(training)

    def make_state(self, fragment: Fragment, values: torch.Tensor) -> None:
        if fragment.elements > 0:
            name = f"outer fragment {fragment.number}"
            fragment.state = FragmentState(values, self.options, name=name, gpu=self._gpu, threads=self._threads)

    def _require_same_state(self, training: ShardedState) -> None:
        """Refuse hosts that have loaded checkpoints of different trainings or steps."""
        for fragment in self.fragments:
            differs = [self._differs(values) for values in fragment.state_values()]  # any() would not let all hosts compare all
            if is_so_on_a_rank(training, any(differs)):
                refuse(
                    "cannot continue to train: the hosts have loaded different states of the outer optimizer",
                    where=f"fragment {fragment.number}",
                    needed="checkpoints of one training, of the same step, on all hosts",
                )

    def _differs(self, values: torch.Tensor) -> bool:
        # A checksum has 64 bits, and the hosts exchange integers with a sign.
        checksum = 0 if values.numel() == 0 else _core.checksum(memoryview(values.numpy()).cast("B")) >> 2
        sums = self.hosts.rows([checksum])
        return any(row != sums[0] for row in sums)

    # --- Exchanges ---

    def after_step(self, training: ShardedState, step: int) -> None:
        """Exchange the fragment that is due after this step of the host, counted from 1."""
        number = due_at(step, self.options.every, self.options.fragments)
        if number is not None:
            self._exchange(training, self.fragments[number], step)

    def exchange_all(self, training: ShardedState, step: int) -> None:
        """Exchange the fragments that were not exchanged after this step."""
        for fragment in self.fragments:
            if fragment.exchanged_at < step:
                self._exchange(training, fragment, step)

    def _exchange(self, training: ShardedState, fragment: Fragment, step: int) -> None:
        begin = time.monotonic()
        values = fragment.read(training)
        if fragment.state is not None:
            fragment.state.subtract(values)
        while not self._is_updated(fragment, step, values):
            pass
        self.hosts.wait_for_neighbours()
        if fragment.state is not None:
            fragment.state.read(values)
        fragment.write(training, values)
        fragment.exchanged_at = step
        self._exchanges += 1
        self._last = time.monotonic() - begin

    def _is_updated(self, fragment: Fragment, step: int, differences: torch.Tensor) -> bool:
        """Update the outer copy with the average of the hosts' differences. Return whether this is done: a host may be lost
        meanwhile, or another host may have to catch up first. Ranks of one host may do this a different number of times."""
        try:
            if (behind := self._behind(fragment, step)) is not None:
                return self._catch_up(*behind)
            gradients = self.hosts.average(differences, fragment=fragment.number, step=step)
        except FailureError as error:
            self.hosts.regroup(error)
            return False
        if fragment.state is not None:
            fragment.state.step(gradients)
        return True

    def _behind(self, fragment: Fragment, step: int) -> tuple[int, int, bool] | None:
        """Return nothing if all hosts make the same exchange. If some have missed the end of the last one, because a host was
        lost during it, return a host that has not, its fragment, and whether this host has missed it."""
        rows = self.hosts.rows([self._exchanges, fragment.number, step])
        most, least = max(rows)[0], min(rows)[0]
        if most == least + 1 and self.hosts.regroups > 0:
            root = next(rank for rank, row in enumerate(rows) if row[0] == most)
            number = next(row[1] for row in rows if row[0] == least)
            return root, number, self._exchanges == least
        if any(row != rows[0] for row in rows):
            steps = ", ".join(f"host {host} after step {row[2]}" for host, row in zip(self.hosts.members, rows))
            refuse_order(
                f"cannot exchange parameters: {steps}",
                where="outer=DiLoCo(...)",
                needed="the same number of steps on all hosts",
                remedy="Load the same checkpoint on all hosts, and call exchange() on all of them.",
            )
        return None

    def _catch_up(self, root: int, number: int, is_mine: bool) -> bool:
        """Give the outer state after the last exchange to hosts that have missed it. Return whether this host has."""
        source = self.fragments[number]
        state = source.state_values()
        for values in state:
            self.hosts.broadcast(values, root)
        self.hosts.barrier()
        if is_mine and source.state is not None:
            source.state.write(*state)
        return is_mine

    # --- While something else needs the device ---

    def offload(self) -> None:
        for state in self._states().values():
            state.offload()

    def reload(self) -> None:
        for state in self._states().values():
            state.reload()

    # --- Reports ---

    def _states(self) -> dict[int, FragmentState]:
        return {fragment.number: fragment.state for fragment in self.fragments if fragment.state is not None}

    def ledger(self) -> str:
        """Return tables of the bytes that this rank keeps for the outer optimizer."""
        states = self._states().items()
        return "".join(f"\nouter optimizer, fragment {number}\n{state.ledger()}" for number, state in states)

    def figures(self) -> dict[str, float]:
        inside, across = self.hosts.sent_bytes
        return {
            "outer/exchanges": float(self._exchanges),
            "outer/hosts": float(self.hosts.size),
            "outer/seconds": self._last,
            "outer/sent_bytes/inside": float(inside),
            "outer/sent_bytes/across": float(across),
            "outer/state_bytes": float(sum(state.bytes for state in self._states().values())),
        }

    def forget(self) -> None:
        """Forget all state. The next begin() or begin_to_load() begins again."""
        self.fragments, self._exchanges, self._is_compared, self.identity = [], 0, True, ""

    def close(self) -> None:
        self.forget()
        self.hosts.leave()
