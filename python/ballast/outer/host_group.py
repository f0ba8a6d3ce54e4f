"""The group of the same rank of each host, which averages the gradients of the outer optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from ballast import _core
from ballast.checks import fail
from ballast.connecting import Group, connect
from ballast.errors import FailureError
from ballast.outer.host_rank import HostRank
from ballast.outer.survivors import HostRendezvous, agree_on_survivors
from ballast.torch.collectives import broadcast
from ballast.wire import EXACT

log = logging.getLogger("ballast")

MOST_REPEATS = 3  # of the rendezvous of hosts that are all there, and cannot connect with each other
CHUNK = 4 << 20  # elements that are summed at a time
OF_PEERS = {"B3301": "peer_failed", "B3302": "peer_late", "B3303": "no_meeting"}  # errors that other ranks may cause


class HostGroup:
    """A connection of its own: its failure does not end the group of the ranks of one host. Each call is made by all hosts
    together."""

    def __init__(self, own: HostRank, rendezvous: HostRendezvous, wire: str = EXACT, neighbours: Group | None = None):
        """`neighbours` are the ranks of this host, in a group with a long timeout; None for one rank."""
        self.own = own
        self._neighbours = neighbours
        self.members = [*range(len(own.names))]  # numbers of the hosts that take part
        self._rendezvous = rendezvous
        self._wire = _core.WireFormat[wire]
        self._sent_before = 0, 0  # in groups that lost a host
        self._regroups = 0
        self._group = self._connect()

    def _connect(self) -> Group:
        rank, size = self.members.index(self.own.host), len(self.members)
        where = self._rendezvous
        if size == 1:
            return connect(rank=0, size=1)
        job = f"{where.job}/{self._regroups}"
        return connect(store=where.store, rank=rank, size=size, host=where.address, job=job, timeout=where.timeout)

    @property
    def group(self) -> Group:
        """The hosts that take part now."""
        return self._group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def survives(self) -> bool:
        return self._rendezvous.survives

    @property
    def has_regrouped(self) -> bool:
        return self._regroups > 0

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """The bytes that this rank has sent so far, to hosts on this machine and to those on others."""
        inside, across = self._group._core.sent_bytes
        return self._sent_before[0] + inside, self._sent_before[1] + across

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the integers that each host gives, by rank in the group. All hosts give as many."""
        words = [0] * (self.size * len(mine))
        words[self.rank * len(mine) : (self.rank + 1) * len(mine)] = mine
        with self._naming_hosts():
            words = self._group.all_reduce(words)
        return [words[first : first + len(mine)] for first in range(0, len(words), len(mine))]

    def average(self, values: torch.Tensor, *, fragment: int, step: int) -> torch.Tensor:
        """Return the average of the hosts' values of a fragment after a step, in fp32, with the same bits on all of them.
        Without hosts that may be lost, it is in the memory of the values.

        The random bits of a rounding belong to the fragment, the step, the host's rank in the group and the element. So an
        exchange that is repeated, or made again by a resumed training, has the same bits."""
        averages = torch.empty_like(values) if self.survives else values
        with self._naming_hosts():
            for chunk, (into, mine) in enumerate(zip(averages.split(CHUNK), values.split(CHUNK))):
                into.copy_(self._sum(mine, step, number=fragment << 32 | chunk).div_(self.size))
            self._group.barrier()  # a host that uses the average knows that the others have it
        return averages

    def _sum(self, mine: torch.Tensor, step: int, number: int) -> torch.Tensor:
        total = torch.empty_like(mine)
        addresses = {"mine": mine.data_ptr(), "into": total.data_ptr()}
        self._group._core.sum(**addresses, count=mine.numel(), format=self._wire, step=step, number=number)
        return total

    def broadcast(self, values: torch.Tensor, root: int = 0) -> None:
        """Copy the values of one host to all."""
        with self._naming_hosts():
            broadcast(self._group, values, root)

    def barrier(self) -> None:
        with self._naming_hosts():
            self._group.barrier()

    def wait_for_neighbours(self) -> None:
        """Wait until all ranks of this host have ended the exchange: one may wait for a lost host, or give its state to another
        one, for longer than ranks wait for each other in a step."""
        if self._neighbours is not None:
            self._neighbours.barrier()

    def leave(self) -> None:
        self._group.leave()
        if self._neighbours is not None:
            self._neighbours.leave()

    # --- When a host is lost ---

    @contextmanager
    def _naming_hosts(self) -> Iterator[None]:
        """Let errors name hosts and ranks of the job, instead of ranks of this group."""
        try:
            yield
        except FailureError as error:
            if error.code in OF_PEERS and self._failed_hosts():
                self._raise_with_hosts(error)
            raise

    def _raise_with_hosts(self, error: FailureError) -> NoReturn:
        what = error.what_happened
        for host in self._failed_hosts():
            rank = self.members.index(host)
            # Only the first one is a rank of this group: others are in the words with which it left.
            what = re.sub(rf"\brank {rank}\b( \([^)]*\))?", f"{self.own.describe_peer(host)},", what, count=1)
        parts = {part: getattr(error, part) for part in ("where", "needed", "available", "remedy")}
        fail(OF_PEERS[error.code], _core.Problem(what=what, **parts))

    def _failed_hosts(self) -> list[int]:
        return [self.members[rank] for rank in self._group._core.failed_ranks]

    def regroup(self, error: FailureError) -> None:
        """Form a group of the hosts that are left. Raise the error where hosts cannot be lost, and where it is one of this
        host alone.

        Each rank of a host decides together with the same rank of the other hosts. If they decide differently, a host is left
        out by some of its ranks, which end. Then its other ranks fail at the end of the exchange, and the other hosts lose it
        there too."""
        failed, repeats = {*self._failed_hosts()} - {self.own.host}, 0
        while True:
            if not self.survives or len(self.members) == 1 or error.code not in OF_PEERS or repeats == MOST_REPEATS:
                raise error
            self._group.leave()
            self._regroups += 1
            before, rendezvous = self.members, self._rendezvous
            self.members = agree_on_survivors(self.own, rendezvous, self._regroups, before, failed)
            repeats = repeats + 1 if self.members == before else 0
            self._log_lost({*before} - {*self.members}, error)
            try:
                connected = self._connect()
                self._sent_before, self._group = self.sent_bytes, connected
                return
            except FailureError as failure:  # another host was lost meanwhile
                error, failed = failure, set()

    def _log_lost(self, lost: set[int], error: FailureError) -> None:
        if self.own.rank > 0:
            return
        if not lost:
            log.warning("all %d hosts connect again, after an error: %s", len(self.members), error.what_happened)
        for host in lost:
            log.warning(
                "lost %s: %d of %d hosts continue without it. The first error is: %s",
                *(self.own.describe(host), len(self.members), len(self.own.names), error.what_happened),
            )
