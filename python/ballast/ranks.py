"""Ranks that work together: they connect, exchange words and objects, agree on failures, and tell each other of their ends."""

from __future__ import annotations

import atexit
import math
import pickle
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

from ballast import _core
from ballast.checks import fail, fail_of_system, refuse, require_timeout
from ballast.errors import Error

T = TypeVar("T")
FILE_CALL = "B3201"


class Store(Protocol):
    """A key-value store in which processes leave messages for each other. A torch.distributed.Store is one."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes | str: ...
    def wait(self, keys: list[str], /) -> object: ...


class Group(_core.Group):
    """Ranks that work together. `connect()` makes the group, and the end of its `with` block leaves it.

    rank, size          the number of this rank, from 0 on, and the number of ranks
    barrier()           returns when all ranks have called it
    all_reduce(values)  returns the sums of the ranks' integers, element by element
    abort(reason)       ends the group: pending and later calls raise B3301 with this reason on all ranks
    leave()             leaves the group without waiting: ranks that wait for this one, or need it later, raise B3301
    close()             leaves the group; rank 0 waits until the others have left, for the timeout at most
    """

    def __init__(self, where: _core.Rendezvous):
        super().__init__(where)
        watch(self)

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
    return Group(_core.Rendezvous(store=store, rank=rank, size=size, host=host, job=job, timeout=timeout))


# --- The ends of ranks. The group itself tells others of all ends but exceptions ---

_makers: weakref.WeakKeyDictionary[Group, threading.Thread] = weakref.WeakKeyDictionary()


def watch(group: Group) -> None:
    """Tell the other ranks of the group about an exception that ends this thread or the process. The group itself tells
    them about all other ends."""
    _watch_ends()
    _makers[group] = threading.current_thread()


def words_of(error: BaseException) -> str:
    """Describe an exception as the last line of its traceback does."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@cache  # each process calls it once
def _watch_ends() -> None:
    atexit.register(begin_exit)
    report = threading.excepthook

    def fail_with_thread(ended: threading.ExceptHookArgs) -> None:
        for group, maker in list(_makers.items()):
            error = ended.exc_value
            is_regular = isinstance(error, SystemExit) and not error.code
            if maker is ended.thread and error is not None and not is_regular:
                group.fail(words_of(error))
        report(ended)

    threading.excepthook = fail_with_thread


def begin_exit() -> None:
    """Tell other ranks about an uncaught exception. The process itself tells them about all other ends."""
    uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # last_exc from Python 3.12 on
    is_interactive = hasattr(sys, "ps1")  # it continues after an exception, so this may be an old one
    if uncaught is not None and not is_interactive:
        for group in list(_makers):
            if group.size > 1:  # a rank alone still releases its memory
                group.fail(words_of(uncaught))
    _core.begin_exit()


# --- Agreement: an operation fails on all ranks if it fails on one, so that no rank waits for another that has given up ---


def failed_ranks(group: Group, failed: bool) -> list[int]:
    """Return the ranks that have failed. All ranks call it together."""
    words = [int(failed and rank == group.rank) for rank in range(group.size)]
    words.append(0)  # a count that no other call sends: a rank that makes another call instead is named (B1003)
    return [rank for rank, word in enumerate(group.all_reduce(words)) if word]


def fail_with_peers(group: Group, what: str, failed: Sequence[int], mine: Mapping[str, str] | None) -> None:
    """Raise the error of the first rank that failed, on the ranks that did not. `mine` has the parts of this rank's own error.
    All ranks call it together."""
    first = from_all_ranks(group, mine)[failed[0]]
    if mine is None:
        where = [f"rank {', '.join(map(str, failed))}", first.pop("where")]
        fail("peer_failed", f"{what} failed on other ranks: {first.pop('what')}", where=": ".join(filter(None, where)), **first)


def parts_of(error: BaseException) -> dict[str, str]:
    """Return the parts of the message of an error, for other ranks."""
    what = f"{error.code} {error.what_happened}" if isinstance(error, Error) else words_of(error)
    return {"what": what, **{name: str(getattr(error, name, "")) for name in ("where", "needed", "available", "remedy")}}


class Agreement:
    """Lets ranks attempt an operation, each on its own, and settle together whether it failed."""

    def __init__(self, group: Group, what: str):
        self.group = group
        self._what = what
        self.error: Exception | None = None  # the first error of this rank
        self.has_failed = False  # settle() has raised, on all ranks

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep an exception of the block for settle(), instead of raising it."""
        try:
            try:
                yield
            except OSError as error:
                fail_of_system(error)
        except Exception as error:
            if self.error is None:
                self.error = error

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Attempt the block, and settle after it."""
        with self.attempt():
            yield
        self.settle()

    def settle(self) -> None:
        """Raise this rank's error, or name the ranks that failed. All ranks call it together."""
        failed = failed_ranks(self.group, self.error is not None)
        self.has_failed = bool(failed)
        try:
            if failed:
                fail_with_peers(self.group, self._what, failed, None if self.error is None else parts_of(self.error))
        finally:
            if self.error is not None:
                self._raise()

    def _raise(self) -> NoReturn:
        """Raise the error, and forget it: the error keeps this frame alive, so a reference back would form a cycle. The
        caller's objects would then live until garbage collection, and other ranks would wait for their end."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error


# --- Exchanges ---


def from_all_ranks(group: Group, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call it together."""
    return [pickle.loads(theirs) for theirs in group.from_all(pickle.dumps(value))]


def words_of_all_ranks(group: Group, mine: Sequence[int]) -> list[list[int]]:
    """Return each word of all ranks, by rank, in one exchange. All ranks call it together, with as many words."""
    sent = [word if rank == group.rank else 0 for word in mine for rank in range(group.size)]
    words = group.all_reduce(sent)
    return [words[first : first + group.size] for first in range(0, len(words), group.size)]


def numbers_of_all_ranks(group: Group, mine: Sequence[float]) -> list[list[float]]:
    """Return each number of all ranks, by rank, in one exchange. All ranks call it together, with as many numbers."""
    words = words_of_all_ranks(group, struct.unpack(f"{len(mine)}q", struct.pack(f"{len(mine)}d", *mine)))
    return [[*struct.unpack(f"{group.size}d", struct.pack(f"{group.size}q", *each))] for each in words]


def by_first_rank(group: Group, what: str, do: Callable[[], T]) -> T:
    """Call `do` on rank 0, and return its result on all ranks, or raise its error on all. All ranks call this together."""
    together = Agreement(group, what)
    mine: list[T] = []
    with together.attempt():
        if group.rank == 0:
            mine.append(do())
    failed = together.error
    of_all = failed if isinstance(failed, Error) and failed.code != FILE_CALL else None  # a drive fails on rank 0 alone
    found, error = from_all_ranks(group, (mine, of_all))[0]
    del failed, of_all
    if error is None:
        together.settle()  # another error is raised on rank 0, and other ranks name it
        result: T = found[0]
        return result
    together.error = None
    try:
        raise error
    finally:
        del error  # the raised error keeps this frame alive, as in Agreement


def require_same(group: Group, options: Mapping[str, str]) -> None:
    """Refuse options, by name, of which a rank has another value than rank 0. All ranks call it together, and raise the same
    error."""
    group.require_same_options([*options.items()])


def least_and_most(group: Group, mine: Collection[float]) -> list[float]:
    """Return the least and the greatest number of all ranks. Return one number if they are equal, none if no rank has
    one, and NaN if one is not finite. All ranks call it together."""
    ends = [0.0, 0.0, 0.0]  # whether this rank has numbers, its least and its greatest
    if mine:
        ends = [1.0, min(mine), max(mine)] if all(map(math.isfinite, mine)) else [1.0, math.nan, math.nan]
    there, *by_rank = numbers_of_all_ranks(group, ends)
    numbers = {number for each in by_rank for has, number in zip(there, each) if has}
    if any(map(math.isnan, numbers)):
        return [math.nan]
    return sorted({min(numbers), max(numbers)}) if numbers else []


def agree_on_memory(group: Group, what: str, failed: bool) -> None:
    """Raise an error where one of the other ranks has failed to allocate the memory for an operation, so that no rank does it.
    All ranks call it together, after they have tried."""
    ranks = failed_ranks(group, failed)
    if ranks and not failed:
        fail(
            "peer_failed",
            f"cannot complete {what}: other ranks have no memory for it, so it is not done here either",
            where=f"rank {', '.join(map(str, ranks))}",
            remedy="Free memory there, and call it again on all ranks.",
        )
