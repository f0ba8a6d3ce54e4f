"""Refuse calls of another thread while one runs. A call of a training is several calls of the library, which all ranks make in
the same order."""

from __future__ import annotations

import threading
from functools import partial
from typing import NoReturn

from ballast.checks import refuse_order


class OneThread:
    """Lets one thread at a time make calls. The thread may make others inside of its call."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.try_begin = partial(lock.acquire, False)  # of a call that comes with each gradient, and is not named
        self.end = lock.release
        self.running: Call | None = None

    def call(self, what: str) -> Call:
        """Make a call inside the block."""
        return Call(self, what)


class Call:
    """A block. Generators of contextlib take longer than what a call of a small model does."""

    def __init__(self, calls: OneThread, what: str):
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        if not self._calls.try_begin():
            refuse_other_thread(self._what, self._calls.running)
        self._thread = threading.current_thread()
        self._outer, self._calls.running = self._calls.running, self

    def __exit__(self, *_: object) -> None:
        self._calls.running = self._outer
        self._calls.end()

    def __str__(self) -> str:
        return f"thread {self._thread.name}, in {self._what}"


def refuse_other_thread(what: str, running: Call | None = None) -> NoReturn:
    refuse_order(
        f"cannot make a call of {what}: another thread is in a call of the optimizer or the model",
        where="" if running is None else str(running),
        needed="calls of one thread at a time",
        remedy="Make all calls of an optimizer and its model from one thread, or hold a lock around them.",
    )
