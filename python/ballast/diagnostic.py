"""The results of `ballast doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnostic:
    """One result. `state` is "good", "note" (slower, or smaller than it could be) or "bad" (a training would fail)."""

    state: str
    about: str
    found: str
    remedy: str = ""


def good(about: str, found: str) -> Diagnostic:
    """Return a result without a remedy."""
    return Diagnostic("good", about, found)


def note(about: str, found: str, remedy: str) -> Diagnostic:
    """Return a result that could be better."""
    return Diagnostic("note", about, found, remedy)


def bad(about: str, found: str, remedy: str) -> Diagnostic:
    """Return a problem that would stop a training."""
    return Diagnostic("bad", about, found, remedy)
