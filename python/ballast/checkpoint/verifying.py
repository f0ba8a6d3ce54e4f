"""Read all of a checkpoint, and compare it with its checksums. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.contents import Checkpoint
from ballast.checkpoint.pieces import Piece
from ballast.errors import Error


def problems_of(directory: str | Path) -> list[str]:
    """Return a line for each problem; an empty list if there is none. Raise an error where the manifest cannot be read.

    A saving may replace the checkpoint and remove its files meanwhile. Then the new checkpoint is read."""
    directory = Path(directory)
    for _ in range(manifest.READS):
        checkpoint = manifest.read(directory)
        problems = list(_problems(directory, checkpoint))
        if not problems or manifest.folder_in(directory) == checkpoint.folder:
            return problems
    manifest.fail_replaced(directory)


def _problems(directory: Path, checkpoint: Checkpoint) -> Iterator[str]:
    for rank in range(checkpoint.ranks):
        try:
            manifest.read_extra(directory, checkpoint, rank)
        except Error as error:
            yield _line(error)
    by_file: dict[int, list[tuple[Piece, str]]] = {rank: [] for rank in range(checkpoint.ranks)}
    for name, tensor in checkpoint.tensors.items():
        for piece in tensor.pieces:
            by_file[piece.file].append((piece, name))
    for data, pieces in zip(manifest.data_files(directory, checkpoint), by_file.values()):
        yield from _problems_of_file(data, sorted(pieces, key=lambda each: each[0].offset))


def _problems_of_file(path: str, pieces: list[tuple[Piece, str]]) -> Iterator[str]:
    try:
        reader = _core.CheckpointReader([path], [(0, piece.offset, piece.bytes, piece.seal) for piece, _ in pieces])
    except Error as error:
        yield _line(error)
        return
    for piece, name in pieces:
        try:
            reader.next()
        except Error as error:
            yield f"{_line(error)}: {name}, elements {piece.first} to {piece.end}"


def _line(error: Error) -> str:
    return f"{error.code} {error.what_happened}: {error.where}"
