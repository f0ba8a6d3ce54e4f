"""The ranks that train together, as torch knows them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import default_store
from ballast.checks import refuse
from ballast.connecting import Group, connect
from ballast.wrapper.options import WrapOptions


@dataclass(frozen=True)
class ProcessGroups:
    """Who trains together."""

    of_data: Group  # those that share the state, and whose gradients are averaged
    of_model: Group | None  # those that have other parts of the same model, over which the norm runs too
    repeated: frozenset[int]  # ids of parameters that all of these have alike

    def counts(self, parameter: torch.Tensor) -> bool:
        """In the norm: what several ranks have counts on the first of them."""
        return self.of_model is None or self.of_model.rank == 0 or id(parameter) not in self.repeated

    def leave(self) -> None:
        """Tell the other ranks that this one takes part in nothing more."""
        self.of_data.leave()
        if self.of_model is not None:
            self.of_model.leave()


def connect_groups(
    process_group: Any, norm_group: Any, replicated: Iterable[torch.Tensor], options: WrapOptions
) -> ProcessGroups:
    """With all ranks of these groups of torch.distributed."""
    repeated = frozenset(id(parameter) for parameter in replicated)
    if norm_group is None:
        if repeated:
            refuse("cannot use replicated parameters without the ranks that have them", needed="norm_group")
        return ProcessGroups(group_of(process_group, options.timeout), None, repeated)
    ranks_of = torch.distributed.get_process_group_ranks
    both = set(ranks_of(process_group)) & set(ranks_of(norm_group))  # None are all ranks
    if len(both) > 1:
        refuse(
            f"cannot use process_group and norm_group together: ranks {sorted(both)} are in both",
            needed="ranks with other data in process_group, and those with other parts of the model in norm_group",
        )
    of_data = group_of(process_group, options.timeout)
    return ProcessGroups(of_data, group_of(norm_group, options.timeout), repeated)


def group_of(process_group: Any, timeout: float | None) -> Group:
    """The ranks of `process_group`; without one, all that torch.distributed has, or the launcher's."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if process_group is not None:
            needed = "torch.distributed.init_process_group()"
            refuse("cannot use process_group: torch.distributed is not initialized", needed=needed)
        return connect(timeout=timeout)
    ranks = distributed.group.WORLD if process_group is None else process_group
    rank, size = distributed.get_rank(ranks), distributed.get_world_size(ranks)
    if rank < 0:
        refuse("cannot use process_group: this process is not in it")
    if size == 1:
        return connect(rank=0, size=1, timeout=timeout)
    store = default_store()
    name = ranks.group_name
    # All ranks of a group wrap in the same order, so the same count means the same optimizer.
    count = store.add(f"ballast/{name}/{rank}", 1)
    return connect(store=store, rank=rank, size=size, host=own_address(), job=f"ballast/{name}/{count}", timeout=timeout)


def rank_in_job() -> int:
    """Of this process, among all that torch.distributed has, or that the launcher has started."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _core.launched_rank()


def own_address() -> str:
    """Of this machine, as those on others reach it; empty where all are on this one."""
    master = os.environ.get("MASTER_ADDR", "")
    if master in ("", "localhost", "127.0.0.1", "::1"):
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing, but chooses the way
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return ""
