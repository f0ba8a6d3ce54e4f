"""Refuse calls of another thread while one runs. A call of a session is several calls of the library, which all ranks make in
the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ballast.checks import refuse_order


class OneThread:
    """Lets one thread at a time make calls. The thread may make others inside of its call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = ""

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Make a call inside the block."""
        self.begin(what)
        outer, self._running = self._running, f"thread {threading.current_thread().name}, in {what}"
        try:
            yield
        finally:
            self._running = outer
            self.end()

    def begin(self, what: str) -> None:
        """Begin a short call, which the errors of other threads do not name."""
        if not self._lock.acquire(blocking=False):
            refuse_other_thread(what, self._running)

    def end(self) -> None:
        self._lock.release()


def refuse_other_thread(what: str, running: str = "") -> NoReturn:
    refuse_order(
        f"cannot make a call of {what}: another thread is in a call of the optimizer or the model",
        where=running,
        needed="calls of one thread at a time",
        remedy="Make all calls of an optimizer and its model from one thread, or hold a lock around them.",
    )
