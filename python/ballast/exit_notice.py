"""Tell the other ranks when an exception ends this one."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from functools import cache
from typing import TypeGuard

from ballast import _core

_makers: weakref.WeakKeyDictionary[_core.Group, threading.Thread] = weakref.WeakKeyDictionary()


def watch(group: _core.Group) -> None:
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


@cache  # once in a process
def _watch_ends() -> None:
    atexit.register(begin_exit)
    report = threading.excepthook

    def fail_with_thread(ended: threading.ExceptHookArgs) -> None:
        for group, maker in list(_makers.items()):
            if maker is ended.thread and _is_failure(ended.exc_value):
                group.fail(words_of(ended.exc_value))
        report(ended)

    threading.excepthook = fail_with_thread


def _is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def begin_exit() -> None:
    """Tell other ranks about an uncaught exception. The process itself tells them about all other ends."""
    uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # last_exc from Python 3.12 on
    is_interactive = hasattr(sys, "ps1")  # it continues after an exception, so this may be an old one
    if uncaught is not None and not is_interactive:
        for group in list(_makers):
            if group.size > 1:  # a rank alone still releases its memory
                group.fail(words_of(uncaught))
    _core.begin_exit()
