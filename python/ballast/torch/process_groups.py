"""The process groups of a training: ranks of torch.distributed, or of a launcher."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import default_store, host_of_store
from ballast.checks import refuse
from ballast.connecting import Group, connect
from ballast.replicas import copies_on
from ballast.torch.collectives import from_all_ranks
from ballast.wrapper.options import WrapOptions

log = logging.getLogger("ballast")


@dataclass(frozen=True)
class ProcessGroups:
    """The groups in which this rank trains."""

    of_data: Group  # ranks that share the state, and average gradients
    of_model: Group | None  # ranks with other parts of the same model: the norm includes theirs
    repeated: frozenset[int]  # ids of parameters that all ranks of `of_model` have

    def counts(self, parameter: torch.Tensor) -> bool:
        """Return whether the norm includes this rank's values of the parameter. Of a replicated parameter, it includes
        only those of the first rank."""
        return self.of_model is None or self.of_model.rank == 0 or id(parameter) not in self.repeated

    def leave(self) -> None:
        """Tell the other ranks that this one has left."""
        self.of_data.leave()
        if self.of_model is not None:
            self.of_model.leave()


def connect_groups(
    process_group: Any, norm_group: Any, replicated: Iterable[torch.Tensor], options: WrapOptions
) -> ProcessGroups:
    """Connect with all ranks of these groups of torch.distributed."""
    repeated = frozenset(id(parameter) for parameter in replicated)
    if norm_group is None:
        if repeated:
            refuse("cannot use replicated parameters without the ranks that have them", needed="norm_group")
        return ProcessGroups(group_of(process_group, options.timeout), None, repeated)
    ranks_of = torch.distributed.get_process_group_ranks
    both = set(ranks_of(process_group)) & set(ranks_of(norm_group))  # None stands for all ranks
    if len(both) > 1:
        refuse(
            f"cannot use process_group and norm_group together: ranks {sorted(both)} are in both",
            needed="ranks with other data in process_group, and those with other parts of the model in norm_group",
        )
    of_data = group_of(process_group, options.timeout)
    return ProcessGroups(of_data, group_of(norm_group, options.timeout), repeated)


def group_of(process_group: Any, timeout: float | None) -> Group:
    """Connect the ranks of `process_group`. Without it, connect all ranks of torch.distributed, else the launcher's."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if process_group is not None:
            needed = "torch.distributed.init_process_group()"
            refuse("cannot use process_group: torch.distributed is not initialized", needed=needed)
        return connect(timeout=timeout)
    ranks = distributed.group.WORLD if process_group is None else process_group
    rank, size = distributed.get_rank(ranks), distributed.get_world_size(ranks)
    if rank < 0:
        refuse("cannot use process_group: this process is not in it", needed="wrap() on the ranks of the group only")
    if size == 1:
        return connect(rank=0, size=1, timeout=timeout)
    store = default_store()
    name = ranks.group_name
    # All ranks of a group wrap in the same order, so the same count means the same optimizer.
    count = store.add(f"ballast/{name}/{rank}", 1)
    return connect(store=store, rank=rank, size=size, host=own_address(), job=f"ballast/{name}/{count}", timeout=timeout)


def with_copies_of(group: Group, options: WrapOptions) -> WrapOptions:
    """Return the options with the number of copies of the parameters, for the machines of these ranks."""
    if options.replicas == 1:
        return options
    machines = from_all_ranks(group, _core.machine_name())
    copies = copies_on(machines, options.replicas)
    if group.rank == 0:
        log.info("%d copies of the parameters, each shared by %d ranks", copies, group.size // copies)
    return replace(options, replicas=copies)


def rank_in_job() -> int:
    """Return the rank of this process among all ranks of torch.distributed, or of the launcher."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _core.launched_rank()


def own_address() -> str:
    """Return the address, or the name, at which other machines reach this one; empty if all ranks are on this machine."""
    master = _master()
    if master in ("", "localhost", "127.0.0.1", "::1"):
        return ""
    address = _address_towards(master)
    # Many systems give a machine's own name an address that only the machine itself reaches. Others resolve the name.
    is_own_name = address != "" and ip_address(address.partition("%")[0]).is_loopback
    return master if is_own_name else address


def _master() -> str:
    """Return the host that all ranks reach. init_process_group() may have got it as init_method="tcp://...", too."""
    distributed = torch.distributed
    is_initialized = distributed.is_available() and distributed.is_initialized()
    of_store = host_of_store(default_store()) if is_initialized else ""
    return of_store or os.environ.get("MASTER_ADDR", "")


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to a host; empty if there is none."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing, and chooses the route
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return ""
