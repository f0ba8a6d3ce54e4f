"""Refuse calls of another thread while one runs. A call of a training is several calls of the library, which all ranks make in
the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from ballast.checks import refuse_order


class OneThread:
    """Lets one thread at a time make calls. The thread may make others inside of its call."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.try_begin = partial(lock.acquire, blocking=False)  # of a call that comes with each gradient, and is not named
        self.end = lock.release
        self.running = ""

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Make a call inside the block."""
        if not self.try_begin():
            refuse_other_thread(what, self.running)
        outer, self.running = self.running, f"thread {threading.current_thread().name}, in {what}"
        try:
            yield
        finally:
            self.running = outer
            self.end()


def refuse_other_thread(what: str, running: str = "") -> NoReturn:
    refuse_order(
        f"cannot make a call of {what}: another thread is in a call of the optimizer or the model",
        where=running,
        needed="calls of one thread at a time",
        remedy="Make all calls of an optimizer and its model from one thread, or hold a lock around them.",
    )
