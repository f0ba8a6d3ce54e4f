"""Raise errors with the codes of the C++ library."""

from __future__ import annotations

import difflib
import errno
import math
import numbers
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from ballast import _core


def fail(name: str, problem: _core.Problem) -> NoReturn:
    """Raise the error of this name. kernels/runtime/ERRORS.md lists the names."""
    caller = sys._getframe(1)
    while Path(caller.f_code.co_filename) == Path(__file__) and caller.f_back is not None:
        caller = caller.f_back
    _core.fail(name=name, problem=problem, file=Path(caller.f_code.co_filename).name, line=caller.f_lineno)


def refuse(what: str, *, where: str = "", needed: str = "", available: str = "", remedy: str = "") -> NoReturn:
    """Raise B1001.

    >>> refuse("ranks=0 is not possible", needed="at least 1")
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 ranks=0 is not possible
    ...
    """
    problem = _core.Problem(what=what, where=where, needed=needed, available=available, remedy=remedy)
    fail("bad_argument", problem)


def refuse_order(what: str, *, where: str = "", needed: str, remedy: str = "") -> NoReturn:
    """Raise B1007: the call is not possible now, but may be later."""
    fail("out_of_order", _core.Problem(what=what, where=where, needed=needed, remedy=remedy))


def fail_of_system(error: OSError) -> NoReturn:
    """Raise B2202 for a full drive, or B3201 for another error of the system."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fail("drive_full" if full else "file_call", _core.Problem(what=str(error.strerror), where=str(error.filename or "")))


def one_of(kind: str, word: str, known: Iterable[str], *, or_else: str = "", remedy: str = "") -> str:
    """Return the word if it is known. Otherwise raise an error that offers the nearest known word. `or_else` says what
    the caller accepts apart from known words, and `remedy` what else it can do.

    >>> one_of("tier", "hots", ["device", "host"])
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 there is no tier "hots"
      needed:    one of device, host
      remedy:    Did you mean "host"?
    ...
    """
    names = list(known)
    if word in names:
        return word
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    remedy = " ".join([*([f'Did you mean "{near[0]}"?'] if near else []), *([remedy] if remedy else [])])
    needed = f"one of {', '.join(names)}" + (f", or {or_else}" if or_else else "")
    refuse(f'there is no {kind} "{word}"', needed=needed, remedy=remedy)


def all_known(kind: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first word that is not known."""
    names = list(known)
    for word in words:
        one_of(kind, word, names)


def require_directory(path: str, where: str) -> None:
    """Refuse a path on a drive at which there is no directory."""
    if not Path(path).is_dir():
        refuse(f"cannot use {path}: it is no directory", where=where, needed="a directory that exists, on the drive")


def is_number(value: Any) -> bool:
    """Return whether this is a number, of Python or NumPy. A bool is not one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_timeout(seconds: Any) -> None:
    """Refuse a timeout that is not a positive, finite number."""
    if seconds is not None and not (is_number(seconds) and 0 < seconds < math.inf):
        refuse(f"timeout={seconds!r} is not possible", needed="seconds, above 0 and finite; or None")
