"""The outer optimizer: exchanges fragments of the parameters with the other hosts, between the steps of this one."""

from __future__ import annotations

import secrets
import time
import weakref

import torch

from ballast import _core
from ballast.checks import refuse, refuse_order
from ballast.errors import FailureError
from ballast.outer.fragments import due_at
from ballast.outer.hosts import HostGroup
from ballast.outer.layout import Fragment, FragmentState, cut, is_so_on_a_rank, require_same_cut, require_same_on_hosts
from ballast.outer.options import DiLoCo
from ballast.torch.parameters.units import gpu_of
from ballast.torch.updates.sharded_state import ShardedState

IDENTITY_BITS = 62  # sums of the library's integers have 64, with a sign


class OuterOptimizer:
    """All ranks of all hosts call all methods together, except for reports, offload(), reload() and close()."""

    def __init__(self, hosts: HostGroup, options: DiLoCo, threads: int):
        self.hosts = hosts
        self.options = options
        self._threads = threads
        self.fragments: list[Fragment] = []
        self._training: weakref.ref[ShardedState] | None = None  # whose shards the fragments have
        self._is_compared = True  # whether hosts have compared the state that they have loaded
        self._gpu: int | None = None
        self.identity = ""  # of the training, the same on all hosts and in all its checkpoints
        self._exchanges = 0  # that this host has completed
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
        """Take a random identity of the first rank of the first host."""
        is_first = self.hosts.rank == 0 and training.ranks.rank == 0
        of_first_host = self.hosts.rows([secrets.randbits(IDENTITY_BITS) if is_first else 0])[0]
        [identity] = training.ranks.all_reduce(of_first_host)  # of the others it is 0
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
        """Begin with these values of the outer copy."""
        if fragment.elements > 0:
            name = f"outer fragment {fragment.number}"
            fragment.state = FragmentState(values, self.options, name=name, gpu=self._gpu, threads=self._threads)

    def _require_same_state(self, training: ShardedState) -> None:
        """Refuse hosts that have loaded checkpoints of different trainings or steps."""
        for fragment in self.fragments:
            differs = [self._differs(values) for values in fragment.state_values()]  # not any(): all hosts compare all of them
            if is_so_on_a_rank(training, any(differs)):
                refuse(
                    "cannot continue to train: the hosts have loaded different states of the outer optimizer",
                    where=f"fragment {fragment.number}",
                    needed="checkpoints of one training, of the same step, on all hosts",
                )

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
        if most == least + 1 and self.hosts.has_regrouped:
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


def _checksum(values: torch.Tensor) -> int:
    """Return a number that differs where a value does, and fits into an integer of the library."""
    return 0 if values.numel() == 0 else _core.checksum(memoryview(values.numpy()).cast("B")) >> 2
