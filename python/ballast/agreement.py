"""What fails on one rank fails on all: none waits for another that has given up."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

from ballast import _core
from ballast.checks import fail


class Ranks(Protocol):
    """As much of a Group as it takes."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, values: Sequence[int]) -> list[int]: ...


class Agreement:
    """Ranks attempt something, each on its own, and settle it together."""

    def __init__(self, group: Ranks, what: str):
        self.group = group
        self._what = what
        self.error: Exception | None = None  # the first of this rank
        self.has_failed = False  # settle() has raised, on all ranks

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keeps what its block raises."""
        try:
            try:
                yield
            except OSError as error:
                _fail_of_system(error)
        except Exception as error:
            if self.error is None:
                self.error = error

    def settle(self) -> None:
        """Raises this rank's error, or says whose it is. All ranks come here."""
        words = [0] * self.group.size
        words[self.group.rank] = int(self.error is not None)
        failed = self.group.all_reduce(words)
        self.has_failed = any(failed)
        if self.error is not None:
            self._raise()
        if self.has_failed:
            ranks = ", ".join(str(rank) for rank, count in enumerate(failed) if count)
            fail("peer_failed", _core.Problem(what=f"{self._what} failed on other ranks", where=f"rank {ranks}"))

    def _raise(self) -> NoReturn:
        """What is raised keeps this alive, by the frames that it names: nothing here may keep it, or what the caller has
        would live until Python looks for circles, and other ranks wait for its end."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error


def _fail_of_system(error: OSError) -> NoReturn:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fail("drive_full" if full else "file_call", _core.Problem(what=str(error.strerror), where=str(error.filename or "")))
