"""Say what to do about units that only some ranks use, in the error of ranks that do not gather or reduce one together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ballast import _core
from ballast.checks import fail
from ballast.errors import UsageError


@contextmanager
def naming_unused_units() -> Iterator[None]:
    """Say it in such an error that comes from the block."""
    try:
        yield
        return
    except UsageError as error:
        names = {"B1003": "wrong_size", "B1007": "out_of_order"}
        if error.code not in names or "rank" not in error.what_happened:
            raise
        name, met = names[error.code], error
    remedy = (
        "Make the same calls with the same sizes, in the same order, on all ranks. If a rank has no tokens for an expert, name "
        "the class of the block around it in units=, so that the expert is not a unit of its own. Or call the expert on all "
        "ranks: result + 0 * expert(tokens).sum(), with any tokens."
    )
    problem = _core.Problem(
        what=met.what_happened, where=met.where, needed=met.needed, available=met.available, remedy=remedy
    )
    fail(name, problem)
