"""The process groups of a training, which are ranks of torch.distributed or of a launcher, and exchanges of tensors in them."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import default_store, host_of_store
from ballast.checks import one_of, refuse
from ballast.ranks import Group, connect, from_all_ranks
from ballast.schema import changed
from ballast.step_options import copies_on
from ballast.wrap_options import WrapOptions

log = logging.getLogger("ballast")

# The names of a mesh's dimensions, or their first words: of ranks with other data, and of those with other parts of the model.
OTHER_DATA = ("data", "dp", "fsdp", "replicate", "shard", "context", "cp")
OTHER_PARTS = ("tensor", "tp", "model", "mp", "pipeline", "pp", "expert", "ep")


@dataclass(frozen=True)
class ProcessGroups:
    """The groups in which this rank trains."""

    data_group: Group  # ranks that share the state, and average gradients
    model_group: Group | None  # ranks with other parts of the same model: the norm includes theirs
    repeated: frozenset[int]  # ids of parameters that all ranks of `model_group` have

    def counts(self, parameter: torch.Tensor) -> bool:
        """Return whether the norm includes this rank's values of the parameter. Of a replicated parameter, it includes
        only those of the first rank."""
        return self.model_group is None or self.model_group.rank == 0 or id(parameter) not in self.repeated

    def leave(self) -> None:
        """Tell the other ranks that this one has left."""
        self.data_group.leave()
        if self.model_group is not None:
            self.model_group.leave()


def connect_groups(options: WrapOptions) -> ProcessGroups:
    """Connect with all ranks of the mesh, or of the job."""
    data, parts = ranks_of(options.mesh)
    timeout, repeated = options.tuning.timeout, frozenset(id(parameter) for parameter in options.tuning.replicated)
    if parts is None and repeated:
        refuse("cannot use replicated parameters without the ranks that have them", needed="mesh=, with parts of the model")
    data_group = group_of(data, timeout)
    return ProcessGroups(data_group, None if parts is None else group_of(parts, timeout), repeated)


def ranks_of(mesh: Any) -> tuple[list[int] | None, list[int] | None]:
    """Return the ranks that have other data than this one, and those that have other parts of the model, both with this one.
    None stands for all ranks, and for no other parts."""
    if mesh is None:
        return None, None
    names = mesh.mesh_dim_names or (OTHER_DATA[0],) * mesh.ndim
    if mesh.mesh_dim_names is None and mesh.ndim > 1:
        refuse("cannot use mesh: its dimensions have no names", needed='mesh_dim_names, such as ("data", "tensor")')
    place = mesh.get_coordinate()
    if place is None:
        refuse("cannot use mesh: this process is not in it", needed="wrap() on the ranks of the mesh only")
    kinds = [one_of("kind of dimension of a mesh", name.partition("_")[0], OTHER_DATA + OTHER_PARTS) for name in names]
    data, parts = (
        mesh.mesh[tuple(slice(None) if kind in along else at for kind, at in zip(kinds, place))].flatten().tolist()
        for along in (OTHER_DATA, OTHER_PARTS)
    )
    return data, parts if len(parts) > 1 else None


def group_of(ranks: Sequence[int] | None, timeout: float | None) -> Group:
    """Connect these ranks of torch.distributed. Without them, connect all of its ranks, else the launcher's."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return connect(timeout=timeout)
    ranks = range(distributed.get_world_size()) if ranks is None else ranks
    rank = ranks.index(distributed.get_rank())
    if len(ranks) == 1:
        return connect(rank=0, size=1, timeout=timeout)
    store, name = default_store(), name_of(ranks)
    # All ranks of a group wrap in the same order, so the same count means the same optimizer.
    count = store.add(f"{name}/{rank}", 1)
    return connect(store=store, rank=rank, size=len(ranks), host=own_address(), job=f"{name}/{count}", timeout=timeout)


def name_of(ranks: Sequence[int]) -> str:
    """Return the name of a group in the store."""
    return f"ballast/{len(ranks)}-from-{ranks[0]}-{zlib.crc32(str([*ranks]).encode()):08x}"


def with_copies_of(group: Group, options: WrapOptions) -> WrapOptions:
    """Return the options with the number of copies of the parameters, for the machines of these ranks."""
    if options.replicas == 1:
        return options
    machines = from_all_ranks(group, _core.machine_name())
    copies = copies_on(machines, options.replicas)
    if group.rank == 0:
        log.info("%d copies of the parameters, each shared by %d ranks", copies, group.size // copies)
    return changed(options, replicas=copies)


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
    store_host = host_of_store(default_store()) if is_initialized else ""
    return store_host or os.environ.get("MASTER_ADDR", "")


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


def sum_in_fp32(group: Group | None, mine: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks of the group, which call it together. Without a group, return the tensor itself."""
    if group is None:
        return mine
    total = torch.empty_like(mine)
    group._core.sum(mine.data_ptr(), into=total.data_ptr(), count=mine.numel())
    return total


def broadcast(group: Group, values: torch.Tensor, root: int) -> None:
    """Copy the values of one rank to all, in the host's memory."""
    if values.numel() > 0:
        group._core.broadcast(address=values.data_ptr(), bytes=values.nbytes, root=root)


def broadcast_initial_values(group: Group, parameters: Iterable[torch.Tensor]) -> None:
    """Copy the values of rank 0 to all ranks, which call this together."""
    with torch.no_grad():
        for parameter in parameters:
            values = parameter.detach().to("cpu", copy=True).contiguous()
            broadcast(group, values, root=0)
            parameter.copy_(values)
