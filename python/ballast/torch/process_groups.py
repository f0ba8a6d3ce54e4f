"""The process groups of a training, which are ranks of torch.distributed or of a launcher, and exchanges of tensors in them."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from math import prod
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import default_store, host_of_store
from ballast.checks import one_of, refuse
from ballast.ranks import Group, connect, from_all_ranks
from ballast.schema import changed
from ballast.step_options import copies_on
from ballast.torch.parts import ATTRIBUTE, Part, part_of, parts_among_data
from ballast.wrap_options import WrapOptions

log = logging.getLogger("ballast")

# The names of a mesh's dimensions, or their first words: of ranks with other data, and of those with other parts of the model.
OTHER_DATA = ("data", "dp", "fsdp", "replicate", "shard", "context", "cp")
OTHER_PARTS = ("tensor", "tp", "model", "mp", "pipeline", "pp", "expert", "ep")
OTHER_LAYERS = ("pipeline", "pp")  # ranks along these have no parameters in common
EXPERTS = ("expert", "ep")


@dataclass(frozen=True)
class ProcessGroups:
    """The groups in which this rank trains."""

    data_group: Group  # ranks that share the state, and average gradients
    model_group: Group | None = None  # ranks with other parts of the same model: the norm includes theirs
    repeated: frozenset[int] = frozenset()  # ids of parameters that all ranks of `model_group` have
    dtensors: DTensorRanks | None = None  # the ranks of DTensors, but for experts
    expert_group: Group | None = None  # those of the data group that have the same experts; None: all have

    def sharing(self, parameter: torch.Tensor) -> Group:
        """Return the ranks that have the same values of a parameter and other data."""
        return self.data_group if self.expert_group is None or parts_among_data(parameter) == 1 else self.expert_group

    def counts(self, parameter: torch.Tensor) -> bool:
        """Return whether the norm includes this rank's values of the parameter. Of a replicated parameter, it includes
        only those of the first rank."""
        if self.dtensors is not None:
            return self.dtensors.count(parameter)
        return self.model_group is None or self.model_group.rank == 0 or id(parameter) not in self.repeated

    def saves(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank saves its values of the parameter, and no other one of `saving_group` has the same ones,
        apart from those with other data."""
        return self.dtensors is None or self.dtensors.count(parameter)

    @property
    def saving_group(self) -> Group:
        return self.data_group if self.dtensors is None else self.dtensors.saving_group

    def leave(self) -> None:
        saving_group = None if self.dtensors is None else self.dtensors.saving_group
        for group in (self.data_group, self.model_group, saving_group, self.expert_group):
            if group is not None:
                group.leave()


@dataclass(frozen=True)
class DTensorRanks:
    """The ranks that have the parts of DTensors. All of them have the other parameters of the model."""

    places: Mapping[str | int, int]  # the place of this rank in each dimension of their mesh
    saving_group: Group  # they, and the ranks with other data

    def count(self, parameter: torch.Tensor) -> bool:
        """Return whether this is the first rank with these values of a parameter."""
        part = part_of(parameter)
        dimensions = () if part is None else names_of(part.mesh)
        return (part is None or part.is_first) and not any(at for name, at in self.places.items() if name not in dimensions)


def connect_groups(options: WrapOptions, parameters: Iterable[torch.Tensor] = ()) -> ProcessGroups:
    """Connect with all ranks of the mesh, or of the job, and with those that have other parts of these parameters."""
    data, others = ranks_of(options.mesh)
    timeout, repeated = options.tuning.timeout, frozenset(id(parameter) for parameter in options.tuning.replicated)
    experts, parts = split_experts(data, parameters)
    sharing, places = ranks_of_dtensors(options.mesh, parts) if parts else (None, {})
    if (parts or experts) and options.run.name:
        refuse(
            "cannot train DTensors with run=: ranks with other parts of the model would have records of the same names",
            needed="ballast.save() and ballast.load_checkpoint() in place of run=",
        )
    others = others or sharing
    if others is None and repeated:
        refuse("cannot use replicated parameters without the ranks that have them", needed="mesh=, with parts of the model")
    data_group, expert_group = connect_experts(data, experts, options) if experts else (group_of(data, timeout), None)
    model_group = None if others is None else group_of(others, timeout)
    dtensors = None
    if sharing is not None:
        everybody = sorted({rank for each in from_all_ranks(data_group, sharing) for rank in each})
        dtensors = DTensorRanks(places, group_of(everybody, timeout))
    return ProcessGroups(data_group, model_group, repeated, dtensors, expert_group)


def split_experts(data: Collection[int] | None, parameters: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[Part]]:
    """Return the experts of which ranks with other data have other parts, and the other parts of DTensors."""
    experts, others = [], []
    for each in parameters:
        if (part := part_of(each)) is None:
            continue
        is_of_experts = all(str(name).partition("_")[0] in EXPERTS for name in names_of(part.mesh))
        if not (is_of_experts and (data is None or {*part.ranks} <= {*data})):
            others.append(part)
        elif any(placement.is_shard() for placement in part.placements):
            experts.append(each)
    return experts, others


def connect_experts(data: Sequence[int] | None, experts: Sequence[torch.Tensor], options: WrapOptions) -> tuple[Group, Group]:
    """Connect the ranks with other data, those that have all experts together next to each other, and the ranks with the same
    experts as this one."""
    data = [*range(torch.distributed.get_world_size())] if data is None else data
    parts, timeout = [part for each in experts if (part := part_of(each)) is not None], options.tuning.timeout
    ranks, where = parts[0].ranks, f"experts of shape {tuple(parts[0].shape)} with {parts[0].mesh}"
    if len(ranks) > 1 and (options.stage == 0 or options.replicas != 1):
        what = "cannot train experts: ranks share the state of those that they have in common, in one copy"
        refuse(what, where=where, needed="stage 1, 2 or 3, and replicas=1")
    is_even = all(prod(part.local_shape) * len(ranks) == prod(part.shape) for part in parts)
    if not is_even or any(part.ranks != ranks or part.mesh.ndim > 1 for part in parts):
        what = "cannot train experts: ranks have other numbers of them, or other experts in each layer"
        refuse(what, where=where, needed="one mesh of one dimension for all, and a number of experts that its ranks can divide")
    group = group_of(data, timeout)
    found = sorted({tuple(each) for each in from_all_ranks(group, ranks)})
    together = [rank for each in found for rank in each]
    if sorted(together) != sorted(data) or len({*map(len, found)}) > 1:
        group.leave()
        what = "cannot train experts: their meshes do not divide the ranks with other data into groups of one size"
        refuse(what, where=where, needed=f"meshes of {len(ranks)} ranks each, with all of the ranks {[*data]}")
    if together != [*data]:
        ordered = group_of(together, timeout)
        group.leave()
        group = ordered
    for each, part in zip(experts, parts):
        setattr(each, ATTRIBUTE, replace(part, among_data=len(ranks)))
    return group, group_of(together[ranks.index(torch.distributed.get_rank()) :: len(ranks)], timeout)


def ranks_of(mesh: Any) -> tuple[list[int] | None, list[int] | None]:
    """Return the ranks that have other data than this one, and those that have other parts of the model, both with this one.
    None stands for all ranks, and for no other parts."""
    if mesh is None:
        return None, None
    if mesh.mesh_dim_names is None and mesh.ndim > 1:
        refuse("cannot use mesh: its dimensions have no names", needed='mesh_dim_names, such as ("data", "tensor")')
    if mesh.get_coordinate() is None:
        refuse("cannot use mesh: this process is not in it", needed="wrap() on the ranks of the mesh only")
    data, parts = (_ranks_along(mesh, kinds) for kinds in (OTHER_DATA, OTHER_PARTS))
    return data, parts if len(parts) > 1 else None


def _ranks_along(mesh: Any, kinds: Collection[str]) -> list[int]:
    """Return the ranks of the mesh that differ from this one in dimensions of these kinds only."""
    of_mesh = [_kind_of(name) for name in mesh.mesh_dim_names or OTHER_DATA[:1]]
    index = tuple(slice(None) if kind in kinds else at for kind, at in zip(of_mesh, mesh.get_coordinate()))
    return [int(rank) for rank in mesh.mesh[index].flatten()]


def _kind_of(dimension: str) -> str:
    return one_of("kind of dimension of a mesh", dimension.partition("_")[0], OTHER_DATA + OTHER_PARTS)


def names_of(mesh: Any) -> Sequence[str | int]:
    return mesh.mesh_dim_names or range(mesh.ndim)


def ranks_of_dtensors(mesh: Any, parts: Sequence[Part]) -> tuple[list[int], dict[str | int, int]]:
    """Return the ranks that have the parts of DTensors, and the place of this one in each dimension of their mesh."""
    data, others = ranks_of(mesh)
    if others is None:
        meshes = [*{part.mesh for part in parts}]
        ranks, places = parts[0].ranks, dict(zip(names_of(meshes[0]), meshes[0].get_coordinate() or ()))
    else:
        meshes, sharing = [], [kind for kind in OTHER_PARTS if kind not in OTHER_LAYERS]
        ranks, at = _ranks_along(mesh, sharing), zip(mesh.mesh_dim_names, mesh.get_coordinate())
        places = {name: place for name, place in at if _kind_of(name) in sharing}
    if data is None or len(meshes) > 1 or {*ranks} & {*data} != {torch.distributed.get_rank()}:
        refuse(
            "cannot train DTensors: mesh does not say which ranks have other data, and which ones other parts of the tensors",
            where=f"DTensors with {', '.join(sorted({str(part.mesh) for part in parts}))}",
            needed='mesh=mesh["dp"], the dimension with other data; or all of the mesh if DTensors are of several',
            available="no mesh" if mesh is None else str(mesh),
            remedy="Leave out fully_shard(): Ballast shards parameters over the ranks with other data itself.",
        )
    for part in parts:
        if not {*part.ranks} <= {*ranks}:
            refuse(
                "cannot train a DTensor: its mesh has other ranks than those with other parts of the model",
                where=f"a DTensor of shape {tuple(part.shape)} with {part.mesh}",
                needed=f"a mesh with some of the ranks {ranks}",
            )
    return ranks, places


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
    # All ranks reach this host. init_process_group() may have got it as init_method="tcp://...", too.
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    master = host_of_store(default_store()) if is_initialized else ""
    master = master or os.environ.get("MASTER_ADDR", "")
    if master in ("", "localhost", "127.0.0.1", "::1"):
        return ""
    address = _address_towards(master)
    # Many systems give a machine's own name an address that only the machine itself reaches. Others resolve the name.
    is_own_name = address != "" and ip_address(address.partition("%")[0]).is_loopback
    return master if is_own_name else address


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
    group.sum(mine.data_ptr(), into=total.data_ptr(), count=mine.numel())
    return total


def broadcast(group: Group, values: torch.Tensor, root: int) -> None:
    """Copy the values of one rank to all, in the host's memory."""
    if values.numel() > 0:
        group.broadcast(address=values.data_ptr(), bytes=values.nbytes, root=root)


def broadcast_initial_values(group: Group, parameters: Iterable[torch.Tensor]) -> None:
    """Copy the values of rank 0 to all ranks, which call this together."""
    with torch.no_grad():
        for parameter in parameters:
            values = parameter.detach().to("cpu", copy=True).contiguous()
            broadcast(group, values, root=0)
            parameter.copy_(values)
