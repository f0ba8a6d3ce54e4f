"""Find the hosts of a job, and connect the ranks of this host, and this rank with the same one of every host."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import default_store
from ballast.checks import refuse
from ballast.connecting import Group, connect
from ballast.outer.host_group import HostGroup
from ballast.outer.host_rank import HostRank, host_ranks
from ballast.outer.options import DiLoCo
from ballast.outer.survivors import HostRendezvous
from ballast.torch.collectives import from_all_ranks
from ballast.torch.process_groups import ProcessGroups, group_of, own_address

log = logging.getLogger("ballast")

WAITS = 4  # of an exchange for other hosts: for their values, the survivors, the new group, and the state of one of them


def connect_hosts(process_group: Any, outer: DiLoCo, timeout: float | None) -> tuple[ProcessGroups, HostGroup]:
    """Connect with all ranks of the process group, or of the job. The first result has the ranks of this host, which share
    the state and average gradients in each step; they wait for each other for `timeout`."""
    with group_of(process_group, timeout) as everyone:
        of_all = from_all_ranks(everyone, (_core.machine_name(), socket.gethostname(), outer.shared()))
        require_same_options([options for _, _, options in of_all])
        rank = everyone.rank
    own = host_ranks([machine for machine, _, _ in of_all], [name for _, name, _ in of_all], outer.hosts)[rank]
    if rank == 0:
        log_hosts(own, outer)
    if len(own.names) == 1:
        alone = HostGroup(own, HostRendezvous(None, "", "", outer.timeout, outer.survive_lost_hosts), outer.wire)
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
    inner = _connect_host(own, store, f"{job}/host-{own.host}", timeout)
    neighbours = None
    if own.ranks > 1:
        neighbours = _connect_host(own, store, f"{job}/host-{own.host}/exchanges", WAITS * outer.timeout)
    rendezvous = HostRendezvous(store, f"{job}/rank-{own.rank}", own_address(), outer.timeout, outer.survive_lost_hosts)
    return ProcessGroups(inner, None, frozenset()), HostGroup(own, rendezvous, outer.wire, neighbours)


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


def require_same_options(of_all: Sequence[Mapping[str, str]]) -> None:
    for rank, theirs in enumerate(of_all):
        for name, value in theirs.items():
            if value != of_all[0][name]:
                refuse(
                    f"cannot train: rank {rank} has another {name} of DiLoCo than rank 0",
                    where=f"{name} is {value} on rank {rank}, and {of_all[0][name]} on rank 0",
                    needed="the same options on all ranks",
                )
