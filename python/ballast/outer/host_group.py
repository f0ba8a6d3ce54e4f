"""The ranks with the same place in each host, which exchange the outer optimizer's gradients."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ballast import _core
from ballast.checks import fail
from ballast.connecting import Group, connect
from ballast.errors import Error, FailureError
from ballast.wrapper.collectives import sum_in_fp32

log = logging.getLogger("ballast")

CHUNK = 4 << 20  # elements that are summed at a time
GRACE = 3.0  # seconds in which a host that counts as lost can still report
POLL = 0.05


@dataclass(frozen=True)
class Place:
    """The place of this rank in the job."""

    host: int  # the number of its host
    names: tuple[str, ...]  # of all hosts
    rank: int  # in its host
    ranks: int  # in each host


@dataclass(frozen=True)
class Meeting:
    """How the ranks with one place find each other."""

    store: Any  # a torch.distributed.Store; None for one host
    job: str
    address: str  # of this machine, for the others
    timeout: float | None
    survives: bool  # whether a smaller group continues when a host is lost


class HostGroup:
    """A connection of its own: its failure does not end the group of the ranks of one host. Each call is made by all hosts
    together."""

    def __init__(self, place: Place, meeting: Meeting):
        self.place = place
        self._meeting = meeting
        self.members = [*range(len(place.names))]  # numbers of the hosts that take part
        self._times = 0  # of regroup()
        self._group = self._connect()

    def _connect(self) -> Group:
        rank, size = self.members.index(self.place.host), len(self.members)
        where = self._meeting
        if size == 1:
            return connect(rank=0, size=1, timeout=where.timeout)
        job = f"{where.job}/{self._times}"
        return connect(store=where.store, rank=rank, size=size, host=where.address, job=job, timeout=where.timeout)

    @property
    def group(self) -> Group:
        """The hosts that take part now."""
        return self._group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def survives(self) -> bool:
        return self._meeting.survives

    @property
    def has_lost_hosts(self) -> bool:
        return self._times > 0

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each host, which all give as many."""
        words = [0] * (self.size * len(mine))
        words[self.rank * len(mine) : (self.rank + 1) * len(mine)] = mine
        words = self._group.all_reduce(words)
        return [words[first : first + len(mine)] for first in range(0, len(words), len(mine))]

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Return the average of the hosts' values in fp32, with the same bits on all of them. Without hosts that may be lost,
        it is in the memory of the values."""
        averages = torch.empty_like(values) if self.survives else values
        for into, mine in zip(averages.split(CHUNK), values.split(CHUNK)):
            into.copy_(sum_in_fp32(self._group, mine).div_(self.size))
        self._group.barrier()  # a host that uses the average knows that the others have it
        return averages

    def broadcast(self, values: torch.Tensor, root: int = 0) -> None:
        """Copy the values of one host to all."""
        if values.numel() > 0:
            self._group._core.broadcast(address=values.data_ptr(), bytes=values.nbytes, root=root)

    def barrier(self) -> None:
        self._group.barrier()

    def leave(self) -> None:
        self._group.leave()

    # --- When a host is lost ---

    def regroup(self, error: FailureError) -> None:
        """Form a group of the hosts that are left. Raise the error where hosts cannot be lost."""
        if not self.survives or self.size == 1:
            raise error
        before = self.members
        named = {before[int(rank)] for rank in re.findall(r"\brank (\d+)", error.what_happened) if int(rank) < len(before)}
        self._group.leave()
        self._times += 1
        try:
            self.members = self._agree(before, named - {self.place.host})
            if self.place.rank == 0:
                for host in set(before) - set(self.members):
                    log.warning(
                        "lost host %d (%s): %d of %d hosts continue without it. The first error is: %s",
                        *(host, self.place.names[host], len(self.members), len(self.place.names), error.what_happened),
                    )
            self._group = self._connect()
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

    def _agree(self, before: Sequence[int], named: set[int]) -> list[int]:
        """Return the hosts that are left: those that have reported when the first of them decides. It waits for all, but
        only for a moment for those that the error names."""
        store, prefix = self._meeting.store, f"{self._meeting.job}/without/{self._times}"
        store.set(f"{prefix}/{self.place.host}", "here")
        begin, patience = time.monotonic(), self._meeting.timeout or 300.0
        while True:
            here = [host for host in before if store.check([f"{prefix}/{host}"])]
            waited = time.monotonic() - begin
            missing = set(before) - set(here)
            is_over = not missing or (waited > GRACE and missing <= named) or waited > patience
            if is_over or store.check([f"{prefix}/members"]):
                break
            time.sleep(POLL)
        members: list[int] = json.loads(store.compare_set(f"{prefix}/members", "", json.dumps(here)))
        if self.place.host not in members:
            fail(
                "peer_failed",
                _core.Problem(
                    what=f"cannot continue to train on host {self.place.host}: the other hosts have left it out",
                    where=", ".join(f"host {host} ({self.place.names[host]})" for host in members),
                    remedy="Raise `timeout` if hosts differ in speed.",
                ),
            )
        return members
