"""The exceptions of Ballast: a few types, each with a stable code that the documentation explains."""

from __future__ import annotations


class Error(Exception):
    """The base class of all exceptions. Its text is the full message. Its parts are attributes, which may be empty.

    >>> import ballast
    >>> try:
    ...     ballast.parse_size("40G")
    ... except ballast.Error as error:
    ...     print(error.code, error.what_happened)
    B1001 cannot read the size "40G": it has the unit "g", which is not known or not clear
    """

    code: str = ""  # "B2004"
    what_happened: str = ""
    where: str = ""  # parameter, unit, rank, file
    needed: str = ""
    available: str = ""
    remedy: str = ""


class UsageError(Error, ValueError):
    """The caller requests something that is not possible: B1…."""


class ResourceError(Error):
    """The machine lacks a resource: B2…."""


class OutOfMemoryError(ResourceError, MemoryError):
    """A tier or a budget is too small. `needed`, `available` and `remedy` say what would fit."""


class FailureError(Error, RuntimeError):
    """Hardware or another rank failed: B3…."""
