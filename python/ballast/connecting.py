"""Connect the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ballast import _core
from ballast.checks import refuse, require_timeout
from ballast.exit_notice import watch, words_of
from ballast.store import Store


class Group:
    """Ranks that work together. `connect()` makes the group, and the end of its `with` block leaves it."""

    def __init__(self, core: _core.Group):
        self._core = core
        watch(core)

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 on."""
        return self._core.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._core.size

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self._core.barrier()

    def all_reduce(self, values: Sequence[int]) -> list[int]:
        """Return the sums of the ranks' values, element by element."""
        return self._core.all_reduce(list(values))

    def abort(self, reason: str) -> None:
        """End the group. Pending and later calls raise B3301 with this reason on all ranks."""
        self._core.abort(reason)

    def leave(self) -> None:
        """Leave the group without waiting. Ranks that wait for this one, or need it later, raise B3301."""
        self._core.leave()

    def close(self) -> None:
        """Leave the group. Rank 0 waits here until the others have left, for the timeout at most."""
        self._core.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
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
    """Connect this process to the other ranks, and return their group when all of them have connected.

    The environment of a launcher (torchrun, Open MPI, Slurm) names the ranks. Without a launcher there is one rank.

    store      a key-value store of all ranks; `rank` and `size` then replace the environment
    rank       the number of this rank
    size       the number of ranks
    host       the address of rank 0's machine, if the ranks are on several machines
    job        a name for each group that shares a store
    timeout    seconds of each wait

    >>> with connect(rank=0, size=1) as group:
    ...     group.all_reduce([3, 4])
    [3, 4]
    """
    require_timeout(timeout)
    if (rank is None) != (size is None):
        refuse("rank and size are given together, or not at all", needed="both, or none")
    if rank is not None and size is not None and not 0 <= rank < size:
        refuse(f"there is no rank {rank} of {size}", needed="a rank from 0 on, below the size")
    if size is not None and size > 1 and store is None:
        refuse(
            f"cannot connect {size} ranks: there is no store",
            needed="a store, or a launcher's environment without rank and size",
        )
    where = _core.Rendezvous(store=store, rank=rank, size=size, host=host, job=job, timeout=timeout)
    return Group(_core.Group(where))
