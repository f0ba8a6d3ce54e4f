"""The outer optimizer: exchanges fragments of the parameters with the other hosts, between the steps of this one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ballast import _core
from ballast.checks import refuse_order
from ballast.errors import FailureError
from ballast.outer.fragments import due_at, fragments_of
from ballast.outer.host_group import HostGroup
from ballast.outer.options import DiLoCo
from ballast.outer.state import FragmentState, Span, part_of
from ballast.wrapper.sharded_state import ShardedState
from ballast.wrapper.units import Member, gpu_of


class Fragment:
    """This rank's shard of a fragment, and the state of the outer optimizer for it. A rank may have no elements of it."""

    def __init__(self, number: int):
        self.number = number
        self.spans: dict[int, Span] = {}  # by id of the parameter
        self.elements = 0
        self.state: FragmentState | None = None  # None: there are no elements

    def add(self, member: Member, first: int, count: int) -> None:
        """Add a parameter, of which this rank may have no elements."""
        self.spans[id(member.parameter)] = Span(id(member.parameter), member.name, first, count, self.elements)
        self.elements += count


class OuterOptimizer:
    """All ranks of all hosts call all methods together, except for reports and close()."""

    def __init__(self, hosts: HostGroup, options: DiLoCo, threads: int):
        self.hosts = hosts
        self.options = options
        self._threads = threads
        self.fragments: list[Fragment] = []
        self._gpu: int | None = None
        self._exchanges = 0  # that this host has completed
        self._last = 0.0  # seconds of the last exchange
        self._moved = 0  # bytes of this rank in it

    # --- The beginning ---

    @property
    def has_begun(self) -> bool:
        return bool(self.fragments)

    def begin(self, training: ShardedState) -> None:
        """Begin with the parameters of the first host, if this has not begun yet."""
        if self.has_begun:
            return
        self.cut(training)
        for fragment in self.fragments:
            values = self._read(training, fragment)
            [differing] = training.ranks.all_reduce([int(self._differs(values))])
            if differing > 0:
                self.hosts.broadcast(values)
                self._write(training, fragment, values)
            self.make_state(fragment, values)

    def cut(self, training: ShardedState) -> None:
        """Cut the parameters into fragments, without state. The fragment of a parameter depends on the parameters alone, so
        it is the same in every stage."""
        self._gpu = gpu_of(training.members)
        members = sorted(training.members, key=lambda member: -1 if member.number is None else member.number)
        numbers = fragments_of([member.parameter.numel() for member in members], self.options.fragments)
        self.fragments = [Fragment(number) for number in range(self.options.fragments)]
        for number, member in zip(numbers, members):
            self.fragments[number].add(member, *training.part(member))

    def make_state(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Begin with these values of the outer copy."""
        if fragment.elements > 0:
            name = f"outer fragment {fragment.number}"
            fragment.state = FragmentState(values, self.options, name=name, gpu=self._gpu, threads=self._threads)

    def _differs(self, values: torch.Tensor) -> bool:
        """Return whether hosts have other values."""
        sums = self.hosts.rows([_checksum(values)])
        return any(row != sums[0] for row in sums)

    # --- Exchanges ---

    def after_step(self, training: ShardedState, step: int) -> None:
        """Exchange the fragment that is due after this step of the host, counted from 1."""
        number = due_at(step, self.options.every, self.options.fragments)
        if number is not None:
            self._exchange(training, self.fragments[number], step)

    def exchange_all(self, training: ShardedState, step: int) -> None:
        for fragment in self.fragments:
            self._exchange(training, fragment, step)

    def _exchange(self, training: ShardedState, fragment: Fragment, step: int) -> None:
        begin = time.monotonic()
        values = self._read(training, fragment)
        if fragment.state is not None:
            fragment.state.subtract(values)
        while not self._is_updated(fragment, step, values):
            pass
        if fragment.state is not None:
            fragment.state.read(values)
        self._write(training, fragment, values)
        self._exchanges += 1
        self._last, self._moved = time.monotonic() - begin, 4 * fragment.elements

    def _is_updated(self, fragment: Fragment, step: int, differences: torch.Tensor) -> bool:
        """Update the outer copy with the average of the hosts' differences. Return whether this is done: a host may be lost
        meanwhile, or another host may have to catch up first. Ranks of one host may do this a different number of times."""
        try:
            if (behind := self._behind(fragment, step)) is not None:
                return self._catch_up(*behind)
            gradients = self.hosts.average(differences)
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
        if most == least + 1 and self.hosts.has_lost_hosts:
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
        copy, momentum = torch.empty(source.elements, dtype=torch.float32, device="cpu"), None
        if source.state is not None:
            momentum = torch.empty_like(copy) if source.state.has_momentum else None
            source.state.read(copy, momentum)
        self.hosts.broadcast(copy, root)
        if momentum is not None:
            self.hosts.broadcast(momentum, root)
        self.hosts.barrier()
        if is_mine and source.state is not None:
            source.state.write(copy, momentum)
        return is_mine

    # --- The parameters of this host ---

    def _read(self, training: ShardedState, fragment: Fragment) -> torch.Tensor:
        """Return this rank's shard, as the fp32 values from which parameters are rounded."""
        values = torch.empty(fragment.elements, dtype=torch.float32, device="cpu")

        def look(part: _core.StatePart) -> None:
            for there in _places(training, fragment, part):
                part_of(values[there]).copy_from(part)

        training.visit_shards(look)
        return values

    def _write(self, training: ShardedState, fragment: Fragment, values: torch.Tensor) -> None:
        """Replace this rank's shard of the parameters. Other state of the optimizer stays."""

        def change(part: _core.StatePart) -> None:
            for there in _places(training, fragment, part):
                part.copy_parameter_from(part_of(values[there]))

        training.change_shards(change, training.steps, lambda: None)

    # --- Reports ---

    def ledger(self) -> str:
        """Return tables of the bytes that this rank keeps for the outer optimizer."""
        states = [(fragment.number, fragment.state) for fragment in self.fragments if fragment.state is not None]
        return "".join(f"\nouter optimizer, fragment {number}\n{state.ledger()}" for number, state in states)

    def figures(self) -> dict[str, float]:
        return {
            "outer/exchanges": float(self._exchanges),
            "outer/hosts": float(self.hosts.size),
            "outer/seconds": self._last,
            "outer/bytes": float(self._moved),
        }

    def forget(self) -> None:
        """Forget all state. The next begin() or cut() begins again."""
        self.fragments, self._exchanges = [], 0

    def close(self) -> None:
        self.forget()
        self.hosts.leave()


def _places(training: ShardedState, fragment: Fragment, part: _core.StatePart) -> Iterator[slice]:
    """Yield the place of a part of the training in the fragment's shard, if it is in the fragment."""
    span = None if part.frozen else fragment.spans.get(id(training.member_of(part).parameter))
    if span is not None:
        begin = span.offset + part.first - span.first
        yield slice(begin, begin + part.count)


def _checksum(values: torch.Tensor) -> int:
    """Return a number that differs where a value does, and fits into an integer of the library."""
    return 0 if values.numel() == 0 else _core.checksum(memoryview(values.numpy()).cast("B")) >> 2

