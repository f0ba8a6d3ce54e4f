"""The ranks that train together, as torch knows them."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from ballast.checks import refuse
from ballast.connecting import Group, connect


def group_of(process_group: Any, timeout: float | None) -> Group:
    """The ranks of `process_group`; without one, all that torch.distributed has, or the launcher's."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if process_group is not None:
            refuse("a process_group was given before torch.distributed", needed="torch.distributed.init_process_group()")
        return connect(timeout=timeout)
    ranks = distributed.group.WORLD if process_group is None else process_group
    rank, size = distributed.get_rank(ranks), distributed.get_world_size(ranks)
    if rank < 0:
        refuse("this process is not in the process_group that was given")
    if size == 1:
        return connect(rank=0, size=1, timeout=timeout)
    store = distributed.distributed_c10d._get_default_store()
    name = ranks.group_name
    # All ranks of a group wrap in the same order, so the same count means the same optimizer.
    count = store.add(f"ballast/{name}/{rank}", 1)
    return connect(store=store, rank=rank, size=size, host=own_address(), job=f"ballast/{name}/{count}", timeout=timeout)


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
