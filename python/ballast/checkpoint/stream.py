"""Read chunks of a checkpoint ahead, in the order in which they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from ballast import _core
from ballast.checkpoint.pieces import Piece
from ballast.checks import fail
from ballast.errors import Error


class Stream:
    """Reads the wanted pieces in order. A piece that is needed several times in a row is read once."""

    def __init__(self, files: list[str], wanted: Iterable[Piece]):
        order: list[Piece] = []
        for piece in wanted:
            if not order or order[-1] is not piece:
                order.append(piece)
        self._current: Piece | None = None
        locations = [(piece.file, piece.offset, piece.bytes, piece.seal) for piece in order]
        self.reader = _core.CheckpointReader(files, locations)

    def go_to(self, piece: Piece, name: str) -> _core.CheckpointReader:
        """Return the reader at this piece of the named tensor: the next wanted piece, or the same one again."""
        if self._current is not piece:
            try:
                self.reader.next()
            except Error as error:
                _fail_naming_the_tensor(error, piece, name)
            self._current = piece
        return self.reader


def _fail_naming_the_tensor(error: Error, piece: Piece, name: str) -> NoReturn:
    if error.code != "B3202":
        raise error
    where = f"{error.where}: {name}, elements {piece.first} to {piece.end}"
    fail("bad_record", _core.Problem(what=error.what_happened, where=where))
