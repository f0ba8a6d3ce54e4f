"""Find which chunk holds which elements of a tensor, and which of them a rank needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ballast import _core
from ballast.checks import fail


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a tensor, in a chunk of a file."""

    first: int
    count: int
    file: int
    offset: int
    bytes: int
    seal: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Cut:
    """The elements of a piece that a rank needs."""

    piece: Piece
    first: int  # element of the piece
    into: int  # element of the requested range
    count: int


def cover(pieces: Sequence[Piece], first: int, count: int) -> Iterator[Cut]:
    """Yield the cuts that hold the requested elements. The pieces are in order and have no gaps.

    >>> pieces = [Piece(0, 256, 0, 0, 1024, 7), Piece(256, 44, 1, 0, 176, 8)]
    >>> [(cut.piece.file, cut.first, cut.into, cut.count) for cut in cover(pieces, 128, 160)]
    [(0, 128, 0, 128), (1, 0, 128, 32)]
    """
    low, high = 0, len(pieces)
    while low < high:  # finds the first piece that ends after the first element
        middle = (low + high) // 2
        low, high = (middle + 1, high) if pieces[middle].end <= first else (low, middle)
    for piece in pieces[low:]:
        begin, end = max(first, piece.first), min(first + count, piece.end)
        if begin >= end:
            return
        yield Cut(piece, begin - piece.first, begin - first, end - begin)


def in_order(name: str, elements: int, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces in order. Raise B3202 unless they hold each element of the tensor once."""
    ordered = sorted(pieces, key=lambda piece: piece.first)
    end = 0
    for piece in ordered:
        if piece.first != end:
            break
        end = piece.end
    else:
        if end == elements:
            return ordered
    fail(
        "bad_record",
        _core.Problem(
            what="the checkpoint does not hold each element once",
            where=f"{name}, element {end}",
            needed=f"{elements} elements",
            available=f"{sum(piece.count for piece in pieces)} elements in {len(pieces)} pieces",
        ),
    )


def slices(elements: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first element and the count of each slice of at most this size.

    >>> list(slices(5, 2))
    [(0, 2), (2, 2), (4, 1)]
    """
    for first in range(0, elements, most):
        yield first, min(most, elements - first)
