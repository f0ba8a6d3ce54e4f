"""The hosts of a job: the rank of each process in its host, and the group of the same rank of each host, which averages the
gradients of the outer optimizer and continues without a host that is lost."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast._torch_compat import default_store
from ballast.checks import fail, refuse
from ballast.errors import Error, FailureError
from ballast.formats import EXACT
from ballast.outer.options import DiLoCo, refuse_division
from ballast.ranks import Group, connect, from_all_ranks, require_same, words_of_all_ranks
from ballast.torch.process_groups import ProcessGroups, broadcast, group_of, name_of, own_address

log = logging.getLogger("ballast")

GRACE = 3.0  # seconds in which a host that has failed can still report
POLL = 0.05
MOST_REPEATS = 3  # how often all hosts try again if they cannot connect with each other
CHUNK = 4 << 20  # elements that are summed at a time
OF_PEERS = {"B3301": "peer_failed", "B3302": "peer_late", "B3303": "no_meeting"}  # errors that other ranks may cause
WAITS = 4  # an exchange waits for other hosts: for their values, the survivors, the new group, and the state of one of them


@dataclass(frozen=True)
class HostRank:
    """A rank of a host, which exchanges parameters with the same rank of the other hosts."""

    host: int  # the number of its host
    names: tuple[str, ...]  # all hosts'
    rank: int  # its number in its host
    ranks: int  # how many each host has
    peers: tuple[int, ...]  # the numbers in the job of the same rank of each host

    def describe(self, host: int) -> str:
        """Return the words for a host in errors and in the log.

        >>> HostRank(host=0, names=("a", "b"), rank=1, ranks=2, peers=(1, 3)).describe(1)
        'host 1 (b)'
        """
        return f"host {host} ({self.names[host]})"


def host_ranks(machines: Sequence[str], names: Sequence[str], hosts: int | None) -> list[HostRank]:
    """Return the host and the rank of each process, from the machines of all and their names. With a number of hosts, each
    has as many consecutive ranks.

    >>> [(each.host, each.rank) for each in host_ranks(["a", "b", "a", "b"], ["first", "second"] * 2, None)]
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    >>> [(each.host, each.rank) for each in host_ranks(["a"] * 4, ["first"] * 4, 2)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if hosts is None:
        ranks_by_host: Sequence[Sequence[int]] = _machine_hosts(machines, names)
    elif len(machines) % hosts != 0:
        refuse_division(len(machines), hosts)
    else:
        each = len(machines) // hosts
        ranks_by_host = [range(first, first + each) for first in range(0, len(machines), each)]
    host_names = tuple(names[host_members[0]] for host_members in ranks_by_host)
    made = {
        member: HostRank(host, host_names, rank, len(host_members), tuple(others[rank] for others in ranks_by_host))
        for host, host_members in enumerate(ranks_by_host)
        for rank, member in enumerate(host_members)
    }
    return [made[rank] for rank in range(len(machines))]


def _machine_hosts(machines: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    by_machine: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        by_machine.setdefault(machine, []).append(rank)
    ranks_by_host = list(by_machine.values())
    if len({len(ranks) for ranks in ranks_by_host}) > 1:
        refuse(
            "cannot train with outer=: the hosts have different numbers of ranks",
            where=", ".join(f"{names[ranks[0]]}: {len(ranks)}" for ranks in ranks_by_host),
            needed="as many ranks on each host; or hosts=, a number of hosts with as many consecutive ranks each",
        )
    return ranks_by_host


# --- The hosts that are left ---


@dataclass(frozen=True)
class HostRendezvous:
    """The way in which the same ranks of all hosts find each other."""

    store: Any  # a torch.distributed.Store; None for one host
    job: str
    address: str  # the address where the others reach this machine
    timeout: float
    survives: bool  # whether a smaller group continues when a host is lost


def agree_on_survivors(
    own: HostRank, rendezvous: HostRendezvous, attempt: int, before: Sequence[int], failed: Collection[int]
) -> list[int]:
    """Return the hosts that are left: those that have reported when the first of them decides. It waits for all of them, but
    only for a moment for those that have failed. Raise B3301 on a host that the others have left out, and where the store is
    gone."""
    try:
        survivors = _decide(own.host, rendezvous, f"{rendezvous.job}/without/{attempt}", before, failed)
    except Error:
        raise
    except RuntimeError as failure:  # torch's store raises it
        fail(
            "peer_failed",
            f"cannot continue without the lost host: the store of torch.distributed is gone ({failure})",
            needed="the process that keeps the store: rank 0's, or torchrun's on the first host",
            remedy="Start all hosts again from the last checkpoint.",
        )
    if own.host not in survivors:
        fail(
            "peer_failed",
            f"cannot continue to train on {own.describe(own.host)}: the other hosts have left it out",
            where=", ".join(own.describe(host) for host in survivors),
            remedy="Raise the timeout of DiLoCo if hosts differ in speed.",
        )
    return survivors


def _decide(host: int, rendezvous: HostRendezvous, prefix: str, before: Sequence[int], failed: Collection[int]) -> list[int]:
    store, keys = rendezvous.store, {each: f"{prefix}/{each}" for each in before}
    store.set(keys[host], "here")
    begin = time.monotonic()
    while True:
        are_all_here = store.check([*keys.values()])
        here = [each for each, key in keys.items() if are_all_here or store.check([key])]
        waited = time.monotonic() - begin
        waits_for = set(before) - set(here) - (set(failed) if waited > GRACE else set())
        if not waits_for or waited > rendezvous.timeout or store.check([f"{prefix}/members"]):
            break
        time.sleep(POLL)
    members: list[int] = json.loads(store.compare_set(f"{prefix}/members", "", json.dumps(here)))
    return members


# --- The group ---


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
        self._sent_before = 0, 0  # what it has sent in groups that lost a host
        self.regroups = 0  # how often hosts were lost, or had to connect again
        self.group = self._connect()  # the hosts that take part now

    def _connect(self) -> Group:
        rank, size = self.members.index(self.own.host), len(self.members)
        where = self._rendezvous
        if size == 1:
            return connect(rank=0, size=1)
        job = f"{where.job}/{self.regroups}"
        return connect(store=where.store, rank=rank, size=size, host=where.address, job=job, timeout=where.timeout)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """The bytes that this rank has sent so far, to hosts on this machine and to those on others."""
        inside, across = self.group.sent_bytes
        return self._sent_before[0] + inside, self._sent_before[1] + across

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the integers that each host gives, by rank in the group. All hosts give as many."""
        with self._naming_hosts():
            words = words_of_all_ranks(self.group, mine)
        return [[*row] for row in zip(*words)]

    def average(self, values: torch.Tensor, *, fragment: int, step: int) -> torch.Tensor:
        """Return the average of the hosts' values of a fragment after a step, in fp32, with the same bits on all of them.
        Without hosts that may be lost, it is in the memory of the values.

        The random bits of a rounding belong to the fragment, the step, the host's rank in the group and the element. So an
        exchange that is repeated, or made again by a resumed training, has the same bits."""
        averages = torch.empty_like(values) if self._rendezvous.survives else values
        with self._naming_hosts():
            for chunk, (into, mine) in enumerate(zip(averages.split(CHUNK), values.split(CHUNK))):
                into.copy_(self._sum(mine, step, number=fragment << 32 | chunk).div_(self.size))
            self.group.barrier()  # a host that uses the average knows that the others have it
        return averages

    def _sum(self, mine: torch.Tensor, step: int, number: int) -> torch.Tensor:
        total = torch.empty_like(mine)
        addresses = {"mine": mine.data_ptr(), "into": total.data_ptr()}
        self.group.sum(**addresses, count=mine.numel(), format=self._wire, step=step, number=number)
        return total

    def broadcast(self, values: torch.Tensor, root: int = 0) -> None:
        with self._naming_hosts():
            broadcast(self.group, values, root)

    def barrier(self) -> None:
        with self._naming_hosts():
            self.group.barrier()

    def wait_for_neighbours(self) -> None:
        """Wait until all ranks of this host have ended the exchange: one may wait for a lost host, or give its state to another
        one, for longer than ranks wait for each other in a step."""
        if self._neighbours is not None:
            self._neighbours.barrier()

    def leave(self) -> None:
        self.group.leave()
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
            peer = f"{self.own.describe(host)}, rank {self.own.peers[host]} of the job,"
            what = re.sub(rf"\brank {rank}\b( \([^)]*\))?", peer, what, count=1)
        parts = {part: getattr(error, part) for part in ("where", "needed", "available", "remedy")}
        fail(OF_PEERS[error.code], what, **parts)

    def _failed_hosts(self) -> list[int]:
        return [self.members[rank] for rank in self.group.failed_ranks]

    def regroup(self, error: FailureError) -> None:
        """Form a group of the hosts that are left. Raise the error where hosts cannot be lost, and where it is one of this
        host alone.

        Each rank of a host decides together with the same rank of the other hosts. If they decide differently, a host is left
        out by some of its ranks, which end. Then its other ranks fail at the end of the exchange, and the other hosts lose it
        there too."""
        failed, repeats = {*self._failed_hosts()} - {self.own.host}, 0
        while True:
            if not self._rendezvous.survives or len(self.members) == 1 or error.code not in OF_PEERS or repeats == MOST_REPEATS:
                raise error
            self.group.leave()
            self.regroups += 1
            before, rendezvous = self.members, self._rendezvous
            self.members = agree_on_survivors(self.own, rendezvous, self.regroups, before, failed)
            repeats = repeats + 1 if self.members == before else 0
            self._log_lost({*before} - {*self.members}, error)
            try:
                connected = self._connect()
                self._sent_before, self.group = self.sent_bytes, connected
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


# --- The beginning ---


def connect_hosts(ranks: Sequence[int] | None, outer: DiLoCo, timeout: float | None) -> tuple[ProcessGroups, HostGroup]:
    """Connect with these ranks, or with all of the job. The first result has the ranks of this host, which share
    the state and average gradients in each step; they wait for each other for `timeout`."""
    with group_of(ranks, timeout) as everyone:
        require_same(everyone, {f"{name} of DiLoCo": value for name, value in outer.shared().items()})
        by_rank = from_all_ranks(everyone, (_core.machine_name(), socket.gethostname()))
        rank = everyone.rank
    own = host_ranks([machine for machine, _ in by_rank], [name for _, name in by_rank], outer.hosts)[rank]
    if rank == 0:
        log_hosts(own, outer)
    if len(own.names) == 1:
        alone = HostGroup(own, HostRendezvous(None, "", "", outer.timeout, outer.survive_lost_hosts), outer.wire)
        return ProcessGroups(group_of(ranks, timeout)), alone
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        refuse(
            "cannot train on several hosts with outer=: torch.distributed is not initialized",
            needed="torch.distributed.init_process_group() before",
        )
    store = default_store()
    name = name_of(range(distributed.get_world_size()) if ranks is None else ranks)
    count = store.add(f"{name}/outer/{rank}", 1)  # the count is the same on all ranks, as in group_of()
    job = f"{name}/outer-{count}"
    inner = _connect_host(own, store, f"{job}/host-{own.host}", timeout)
    neighbours = None
    if own.ranks > 1:
        neighbours = _connect_host(own, store, f"{job}/host-{own.host}/exchanges", WAITS * outer.timeout)
    rendezvous = HostRendezvous(store, f"{job}/rank-{own.rank}", own_address(), outer.timeout, outer.survive_lost_hosts)
    return ProcessGroups(inner), HostGroup(own, rendezvous, outer.wire, neighbours)


def log_hosts(own: HostRank, outer: DiLoCo) -> None:
    log.info("the outer optimizer has %d hosts of %d ranks: %s", len(own.names), own.ranks, ", ".join(own.names))
    if len(own.names) == 1 and own.ranks > 1 and outer.hosts is None:
        log.warning(
            "all %d ranks are on one machine, so the outer optimizer has one host and exchanges nothing; hosts= imitates more",
            own.ranks,
        )


def _connect_host(own: HostRank, store: Any, job: str, timeout: float | None) -> Group:
    if own.ranks == 1:
        return connect(rank=0, size=1, timeout=timeout)
    return connect(store=store, rank=own.rank, size=own.ranks, host=own_address(), job=job, timeout=timeout)
