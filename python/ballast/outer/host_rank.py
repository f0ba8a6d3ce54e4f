"""The hosts of a job, and the rank of each process in its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.checks import refuse
from ballast.outer.options import refuse_division


@dataclass(frozen=True)
class HostRank:
    """A rank of a host, which exchanges parameters with the same rank of the other hosts."""

    host: int  # the number of its host
    names: tuple[str, ...]  # of all hosts
    rank: int  # in its host
    ranks: int  # in each host
    peers: tuple[int, ...]  # by host: the number in the job of the same rank of that host

    def describe(self, host: int) -> str:
        """Return the words for a host in errors and in the log.

        >>> HostRank(host=0, names=("a", "b"), rank=1, ranks=2, peers=(1, 3)).describe(1)
        'host 1 (b)'
        """
        return f"host {host} ({self.names[host]})"

    def describe_peer(self, host: int) -> str:
        """Return the words for the same rank of a host.

        >>> HostRank(host=0, names=("a", "b"), rank=1, ranks=2, peers=(1, 3)).describe_peer(1)
        'host 1 (b), rank 3 of the job'
        """
        return f"{self.describe(host)}, rank {self.peers[host]} of the job"


def host_ranks(machines: Sequence[str], names: Sequence[str], hosts: int | None) -> list[HostRank]:
    """Return the host and the rank of each process, from the machines of all and their names. With a number of hosts, each
    has as many consecutive ranks.

    >>> [(each.host, each.rank) for each in host_ranks(["a", "b", "a", "b"], ["first", "second"] * 2, None)]
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    >>> [(each.host, each.rank) for each in host_ranks(["a"] * 4, ["first"] * 4, 2)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    of_hosts = _by_machine(machines, names) if hosts is None else _consecutive(len(machines), hosts)
    host_names = tuple(names[of_host[0]] for of_host in of_hosts)
    made = {
        member: HostRank(host, host_names, rank, len(of_host), tuple(each[rank] for each in of_hosts))
        for host, of_host in enumerate(of_hosts)
        for rank, member in enumerate(of_host)
    }
    return [made[rank] for rank in range(len(machines))]


def _consecutive(ranks: int, hosts: int) -> list[range]:
    if ranks % hosts != 0:
        refuse_division(ranks, hosts)
    each = ranks // hosts
    return [range(first, first + each) for first in range(0, ranks, each)]


def _by_machine(machines: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    of_machine: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        of_machine.setdefault(machine, []).append(rank)
    of_hosts = list(of_machine.values())
    if len({len(ranks) for ranks in of_hosts}) > 1:
        refuse(
            "cannot train with outer=: the hosts have different numbers of ranks",
            where=", ".join(f"{names[ranks[0]]}: {len(ranks)}" for ranks in of_hosts),
            needed="as many ranks on each host; or hosts=, a number of hosts with as many consecutive ranks each",
        )
    return of_hosts
