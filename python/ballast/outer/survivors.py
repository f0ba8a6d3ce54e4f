"""The agreement of hosts on which of them are left, through the store that all of them see."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ballast import _core
from ballast.checks import fail
from ballast.errors import Error
from ballast.outer.host_rank import HostRank

GRACE = 3.0  # seconds in which a host that has failed can still report
POLL = 0.05


@dataclass(frozen=True)
class HostRendezvous:
    """The way in which the same ranks of all hosts find each other."""

    store: Any  # a torch.distributed.Store; None for one host
    job: str
    address: str  # of this machine, for the others
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
    except RuntimeError as failure:  # of torch's store
        fail(
            "peer_failed",
            _core.Problem(
                what=f"cannot continue without the lost host: the store of torch.distributed is gone ({failure})",
                needed="the process that keeps the store: rank 0's, or torchrun's on the first host",
                remedy="Start all hosts again from the last checkpoint.",
            ),
        )
    if own.host not in survivors:
        fail(
            "peer_failed",
            _core.Problem(
                what=f"cannot continue to train on {own.describe(own.host)}: the other hosts have left it out",
                where=", ".join(own.describe(host) for host in survivors),
                remedy="Raise the timeout of DiLoCo if hosts differ in speed.",
            ),
        )
    return survivors


def _decide(
    host: int, rendezvous: HostRendezvous, prefix: str, before: Sequence[int], failed: Collection[int]
) -> list[int]:
    store, keys = rendezvous.store, {each: f"{prefix}/{each}" for each in before}
    store.set(keys[host], "here")
    begin = time.monotonic()
    while True:
        everybody = store.check([*keys.values()])
        here = [each for each, key in keys.items() if everybody or store.check([key])]
        waited = time.monotonic() - begin
        waits_for = set(before) - set(here) - (set(failed) if waited > GRACE else set())
        if not waits_for or waited > rendezvous.timeout or store.check([f"{prefix}/members"]):
            break
        time.sleep(POLL)
    members: list[int] = json.loads(store.compare_set(f"{prefix}/members", "", json.dumps(here)))
    return members
