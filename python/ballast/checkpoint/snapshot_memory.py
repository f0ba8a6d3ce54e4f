"""Check that the hosts have memory for the snapshots of a checkpoint."""

from __future__ import annotations

import socket

from ballast import _core
from ballast.checks import fail
from ballast.connecting import Group
from ballast.hardware import available_memory, this_machine
from ballast.sizes import human_size
from ballast.torch.collectives import from_all_ranks


def has_much_memory(group: Group, needed: int) -> bool:
    """Return whether this machine has memory for another snapshot on each rank, besides those that are there."""
    return available_memory(this_machine()) > group.size * needed


def require_memory(group: Group, needed: int) -> None:
    """Raise B2001 on all ranks if a machine has too little memory for the snapshots of its ranks. `needed` is in bytes, of this
    rank. All ranks call this together."""
    everywhere = from_all_ranks(group, (socket.gethostname(), needed, available_memory(this_machine())))
    for machine in dict.fromkeys(name for name, _, _ in everywhere):
        ranks = [rank for rank, (name, _, _) in enumerate(everywhere) if name == machine]
        total = sum(everywhere[rank][1] for rank in ranks)
        available = min(everywhere[rank][2] for rank in ranks)
        if total > available:
            fail(
                "host_memory",
                _core.Problem(
                    what="cannot save with wait=False: the host has too little memory for a copy of the state",
                    where=f"{machine}, rank {', '.join(map(str, ranks))}",
                    needed=human_size(total),
                    available=human_size(available),
                    remedy="Save with wait=True, which needs no copy. An existing checkpoint stays as it is.",
                ),
            )
