"""Raise errors with the codes of the C++ library."""

from __future__ import annotations

import difflib
import errno
import math
import numbers
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from ballast import _core

NEXT_LINE = "\n" + 13 * " "  # below the value of a field of an error


def fail(name: str, what: str, *, where: str = "", needed: str = "", available: str = "", remedy: str = "") -> NoReturn:
    """Raise the error of this name. kernels/runtime/ERRORS.md lists the names."""
    caller = sys._getframe(1)
    while Path(caller.f_code.co_filename) == Path(__file__) and caller.f_back is not None:
        caller = caller.f_back
    problem = _core.Problem(what=what, where=where, needed=needed, available=available, remedy=remedy)
    _core.fail(name=name, problem=problem, file=Path(caller.f_code.co_filename).name, line=caller.f_lineno)


def refuse(what: str, *, where: str = "", needed: str = "", available: str = "", remedy: str = "") -> NoReturn:
    """Raise B1001.

    >>> refuse("cannot measure: torch is not installed", needed="torch")
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 cannot measure: torch is not installed
    ...
    """
    fail("bad_argument", what, where=where, needed=needed, available=available, remedy=remedy)


def refuse_unsupported(what: str, *, where: str = "", needed: str = "", available: str = "", remedy: str = "") -> NoReturn:
    """Raise B1005."""
    fail("unsupported", what, where=where, needed=needed, available=available, remedy=remedy)


def refuse_value(name: str, value: object, needed: str, *, why: str = "the value is not valid", where: str = "") -> NoReturn:
    """Raise B1001 for an argument of this name.

    >>> refuse_value("every", 0, "at least 1")
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 cannot use every=0: the value is not valid
    ...
    """
    refuse(f"cannot use {name}={value!r}: {why}", where=where, needed=needed)


def refuse_order(what: str, *, where: str = "", needed: str, remedy: str = "") -> NoReturn:
    """Raise B1007: the call is not possible now, but may be later."""
    fail("out_of_order", what, where=where, needed=needed, remedy=remedy)


def fail_of_system(error: OSError) -> NoReturn:
    """Raise B2202 for a full drive, or B3201 for another error of the system."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = f"cannot use a file: {error.strerror or error}"
    fail("drive_full" if full else "file_call", what, where=str(error.filename or ""))


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


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Return whether this is a whole number, of Python or NumPy. A bool is not one."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def read_count(name: str, value: Any, *, least: int = 1, most: int | None = None, needed: str = "", where: str = "") -> int:
    """Return a whole number from `least` to `most`, of Python or NumPy, as Python's. `needed` says what it counts.

    >>> read_count("ranks", True)
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 cannot use ranks=True: it is not a whole number
    ...
    """
    needed = needed or f"a whole number from {least} {'on' if most is None else f'to {most:,}'}"
    if not is_whole_number(value):
        refuse_value(name, value, needed, why="it is not a whole number", where=where)
    if value < least:
        refuse_value(name, value, needed, why=f"it is below {least}", where=where)
    if most is not None and value > most:
        refuse_value(name, value, needed, why=f"it is above {most:,}", where=where)
    return int(value)


def texts_by_name(where: str, text: str) -> dict[str, str]:
    """Return the words of a text by the names before them.

    >>> texts_by_name("wire=", "gather=int8, across=int4")
    {'gather': 'int8', 'across': 'int4'}
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, word = (each.strip() for each in part.partition("="))
        if name in found:
            refuse(f"cannot use {text!r}: it names {name} twice", where=where, needed="each name once")
        found[name] = word
    return found


def require_timeout(seconds: Any) -> Any:
    """Return a timeout, if it is a positive, finite number or None."""
    if seconds is not None and not (is_number(seconds) and 0 < seconds < math.inf):
        refuse_value("timeout", seconds, "seconds, above 0 and finite; or None")
    return seconds
