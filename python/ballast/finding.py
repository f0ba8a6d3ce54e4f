"""One thing that the doctor found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`state` is "good", "note" (slower, or smaller than it could be), or "bad" (would stop a training)."""

    state: str
    about: str
    found: str
    remedy: str = ""


def good(about: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding("good", about, found)


def note(about: str, found: str, remedy: str) -> Finding:
    """Works, and could be better."""
    return Finding("note", about, found, remedy)


def bad(about: str, found: str, remedy: str) -> Finding:
    """Would stop a training."""
    return Finding("bad", about, found, remedy)
