"""Find the hosts of a job, and connect the ranks of this host, and those with the same place in every host."""

from __future__ import annotations

import socket
from typing import Any

import torch

from ballast._torch_compat import default_store
from ballast.checks import refuse
from ballast.connecting import Group, connect
from ballast.outer.host_group import HostGroup, Meeting, Place
from ballast.outer.options import DiLoCo
from ballast.wrapper.collectives import from_all_ranks
from ballast.wrapper.process_groups import ProcessGroups, group_of, own_address


def connect_hosts(process_group: Any, outer: DiLoCo, timeout: float | None) -> tuple[ProcessGroups, HostGroup]:
    """Connect with all ranks of the process group, or of the job. The first result has the ranks of this host, which share
    the state and average gradients in each step."""
    with group_of(process_group, timeout) as everyone:
        of_all = from_all_ranks(everyone, (socket.gethostname(), outer.shared()))
        require_same_options([options for _, options in of_all])
        machines = [machine for machine, _ in of_all]
        places = places_of(machines, outer.hosts)
        place, rank = places[everyone.rank], everyone.rank
    if len(place.names) == 1:
        alone = HostGroup(place, Meeting(None, "", "", timeout, outer.survive_lost_hosts))
        return ProcessGroups(group_of(process_group, timeout), None, frozenset()), alone
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        refuse(
            "cannot train on several hosts with outer=: torch.distributed is not initialized",
            needed="torch.distributed.init_process_group() before",
        )
    store = default_store()
    name = (distributed.group.WORLD if process_group is None else process_group).group_name
    count = store.add(f"ballast/{name}/outer/{rank}", 1)  # as in group_of(): the same on all ranks
    job = f"ballast/{name}/outer-{count}"
    inner = _connect_host(place, store, f"{job}/host-{place.host}", timeout)
    meeting = Meeting(store, f"{job}/place-{place.rank}", own_address(), timeout, outer.survive_lost_hosts)
    return ProcessGroups(inner, None, frozenset()), HostGroup(place, meeting)


def _connect_host(place: Place, store: Any, job: str, timeout: float | None) -> Group:
    if place.ranks == 1:
        return connect(rank=0, size=1, timeout=timeout)
    return connect(store=store, rank=place.rank, size=place.ranks, host=own_address(), job=job, timeout=timeout)


def places_of(machines: list[str], hosts: int | None) -> list[Place]:
    """Return the place of each rank, from the names of the ranks' machines. With a number of hosts, each has as many
    consecutive ranks.

    >>> [(place.host, place.rank) for place in places_of(["a", "a", "b", "b"], None)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> [(place.host, place.rank) for place in places_of(["a", "a", "a", "a"], 2)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if hosts is not None:
        if len(machines) % hosts != 0:
            refuse(
                f"cannot divide {len(machines)} ranks into {hosts} hosts",
                where="outer=DiLoCo(hosts=...)",
                needed="as many ranks on each host",
            )
        ranks = len(machines) // hosts
        return _places([(rank // ranks, rank % ranks) for rank in range(len(machines))], machines[::ranks])
    names = list(dict.fromkeys(machines))
    counts = {name: machines.count(name) for name in names}
    if len(set(counts.values())) > 1:
        refuse(
            "cannot train with outer=: the hosts have different numbers of ranks",
            where=", ".join(f"{name}: {count}" for name, count in counts.items()),
            needed="as many ranks on each host; or hosts=, a number of hosts with as many consecutive ranks each",
        )
    before: dict[str, int] = {}
    numbers = []
    for machine in machines:
        numbers.append((names.index(machine), before.get(machine, 0)))
        before[machine] = before.get(machine, 0) + 1
    return _places(numbers, names)


def _places(numbers: list[tuple[int, int]], names: list[str]) -> list[Place]:
    ranks = len(numbers) // len(names)
    return [Place(host, tuple(names), rank, ranks) for host, rank in numbers]


def require_same_options(of_all: list[dict[str, str]]) -> None:
    for rank, theirs in enumerate(of_all):
        for name, value in theirs.items():
            if value != of_all[0][name]:
                refuse(
                    f"cannot train: rank {rank} has another {name} of DiLoCo than rank 0",
                    where=f"{name} is {value} on rank {rank}, and {of_all[0][name]} on rank 0",
                    needed="the same options on all ranks",
                )
