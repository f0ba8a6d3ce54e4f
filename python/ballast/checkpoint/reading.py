"""Read chunks of a checkpoint ahead, in the order in which they are needed, into tensors of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

import torch

from ballast import _core
from ballast.checkpoint.contents import PARAMETER_DTYPES, Cut, Piece, Tensor
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


class Target(Protocol):
    """A tensor to fill: begin(), take() for each cut in order, finish()."""

    name: str
    entry: Tensor
    first: int  # element of the checkpoint's tensor
    count: int

    def begin(self) -> None: ...
    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None: ...
    def finish(self) -> None: ...


class FlatTarget:
    """Takes elements as they are. begin() makes the flat tensor for them."""

    _flat: torch.Tensor

    def __init__(self, name: str, entry: Tensor, first: int, count: int):
        self.name, self.entry, self.first, self.count = name, entry, first, count
        self._dtype = getattr(torch, entry.dtype)

    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None:
        values = torch.frombuffer(reader.memory(), dtype=self._dtype)[cut.first : cut.first + cut.count]
        self._flat[cut.into : cut.into + cut.count] = values


class PlainTensor(FlatTarget):
    """A buffer, a frozen parameter or its moments: all of its elements, or a shard."""

    def __init__(self, name: str, entry: Tensor, tensor: torch.Tensor, first: int = 0):
        super().__init__(name, entry, first, tensor.numel())
        self._tensor = tensor

    def begin(self) -> None:
        self._flat = torch.empty(self.count, dtype=self._dtype, device="cpu")

    def finish(self) -> None:
        self._tensor.copy_(self._flat.view(self._tensor.shape))
        del self._flat


class TrainedTensor:
    """Takes a parameter that was trained, and is frozen now, with its moments. `parameter` is None where it is sharded:
    then its values go to the shards."""

    def __init__(self, name: str, entry: Tensor, parameter: torch.Tensor | None, moments: Mapping[str, torch.Tensor]):
        self.name, self.entry = name, entry
        self.first, self.count = 0, entry.elements
        self._parameter = parameter
        self._moments = moments

    def begin(self) -> None:
        dtype = torch.float32 if self._parameter is None else self._parameter.dtype
        self._values = torch.empty(self.entry.shape, dtype=dtype, device="cpu")
        at = {kind: moment.data_ptr() for kind, moment in self._moments.items()}
        self._part = _core.StatePart(
            dtype=PARAMETER_DTYPES[str(dtype).removeprefix("torch.")],
            parameter=self._values.data_ptr(),
            momentum=at.get("momentum", 0),
            variance=at.get("variance", 0),
            count=self.entry.elements,
        )

    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None:
        reader.copy(self.entry.kind(), (cut.piece.count, cut.first, cut.into, cut.count), self._part)

    def finish(self) -> None:
        if self._parameter is not None:
            self._parameter.copy_(self._values)
        del self._values, self._part
