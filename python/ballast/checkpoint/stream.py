"""Chunks of a checkpoint's files, read ahead in the order in which they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from ballast import _core
from ballast.checkpoint.pieces import Piece
from ballast.checks import fail
from ballast.errors import Error


class Stream:
    """One that is needed several times in a row is read once."""

    def __init__(self, files: list[str], wanted: Iterable[Piece]):
        order: list[Piece] = []
        for piece in wanted:
            if not order or order[-1] is not piece:
                order.append(piece)
        self._now: Piece | None = None
        places = [(piece.file, piece.offset, piece.bytes, piece.seal) for piece in order]
        self.reader = _core.CheckpointReader(files, places)

    def go_to(self, piece: Piece, name: str) -> _core.CheckpointReader:
        """The reader, at this piece of the tensor of this name: the next that was wanted, or still the same one."""
        if self._now is not piece:
            try:
                self.reader.next()
            except Error as error:
                _say_which(error, piece, name)
            self._now = piece
        return self.reader


def _say_which(error: Error, piece: Piece, name: str) -> NoReturn:
    if error.code != "B3202":
        raise error
    where = f"{error.where}: {name}, elements {piece.first} to {piece.end}"
    fail("bad_record", _core.Problem(what=error.what_happened, where=where))
