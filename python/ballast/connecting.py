"""Ranks that find each other."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ballast import _core
from ballast.checks import refuse, require_timeout
from ballast.leaving import watch, words_of
from ballast.store import Store


class Group:
    """Ranks that work together. Made by `connect()`; left by the end of its `with` block."""

    def __init__(self, core: _core.Group):
        self._core = core
        watch(core)

    @property
    def rank(self) -> int:
        """This one, from 0 on."""
        return self._core.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._core.size

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        self._core.barrier()

    def all_reduce(self, values: Sequence[int]) -> list[int]:
        """The sums of all ranks' values, each beside its own."""
        return self._core.all_reduce(list(values))

    def abort(self, reason: str) -> None:
        """Ends the group: all ranks' pending and later calls raise B3301 with this reason."""
        self._core.abort(reason)

    def leave(self) -> None:
        """Say goodbye, without waiting. Other ranks that wait for this one, or that need it later, raise B3301."""
        self._core.leave()

    def close(self) -> None:
        """Say goodbye. Rank 0 waits here until the others have left."""
        self._core.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(words_of(error))
        self.close()


def connect(
    *,
    store: Store | None = None,
    rank: int | None = None,
    size: int | None = None,
    host: str = "",
    job: str = "",
    timeout: float | None = None,
) -> Group:
    """Returns when all ranks are there. Who they are a launcher's environment says (torchrun, Open MPI, Slurm); without
    one there is one rank, alone.

    With a store, `rank` and `size` may be given instead, and `host`, the address of rank 0's machine where ranks
    are on several. Groups that share a store have a `job` of their own each. `timeout` is seconds, of every wait.

    >>> with connect(rank=0, size=1) as group:
    ...     group.all_reduce([3, 4])
    [3, 4]
    """
    require_timeout(timeout)
    if (rank is None) != (size is None):
        refuse("one of rank and size was given", needed="both, or none")
    if rank is not None and size is not None and not 0 <= rank < size:
        refuse(f"rank {rank} of {size} was given", needed="a rank from 0 on, below the size")
    if size is not None and size > 1 and store is None:
        refuse(f"{size} ranks have no way to meet", needed="a store, or a launcher's environment without rank and size")
    where = _core.Rendezvous(store=store, rank=rank, size=size, host=host, job=job, timeout=timeout)
    return Group(_core.Group(where))
