"""Let an operation fail on all ranks if it fails on one, so that no rank waits for another that has given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

from ballast import _core
from ballast.checks import fail, fail_of_system


class Ranks(Protocol):
    """The part of a Group that an Agreement needs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, values: Sequence[int]) -> list[int]: ...


def failed_ranks(group: Ranks, failed: bool) -> list[int]:
    """Return the ranks that have failed. All ranks call it together."""
    words = [int(failed and rank == group.rank) for rank in range(group.size)]
    return [rank for rank, word in enumerate(group.all_reduce(words)) if word]


class Agreement:
    """Lets ranks attempt an operation, each on its own, and settle together whether it failed."""

    def __init__(self, group: Ranks, what: str):
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
        if self.error is not None:
            self._raise()
        if failed:
            what, where = f"{self._what} failed on other ranks", f"rank {', '.join(map(str, failed))}"
            fail("peer_failed", _core.Problem(what=what, where=where))

    def _raise(self) -> NoReturn:
        """Raise the error, and forget it: the error keeps this frame alive, so a reference back would form a cycle. The
        caller's objects would then live until garbage collection, and other ranks would wait for their end."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error
