"""Write the files of one rank into the folder of a checkpoint: the chunks of its tensors, its `extra`, and their index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ballast import _core
from ballast.checkpoint import contents, manifest
from ballast.checkpoint.folder import flush_folder, write_file

Written = tuple[int, int]  # offset in the file, and seal


class Chunk(NamedTuple):
    """Consecutive elements of a tensor that a rank writes."""

    tensor: str
    first: int
    elements: int


class RankFiles:
    """The files of a rank while they are written, by one thread."""

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank = folder, rank
        self.writer = _core.CheckpointWriter(str(folder / contents.data_name(rank)))

    def finish(self, chunks: Sequence[Chunk], written: Sequence[Written], extra: bytes) -> int:
        """Complete the files with the chunks that were written, and return the bytes of the data. The index gets its name last:
        where it is, all files of the rank are complete and on the drive."""
        bytes_written = self.writer.finish()
        write_file(self._folder / contents.extra_name(self._rank), extra)
        index = self._folder / contents.index_name(self._rank)
        unfinished = index.with_name(f"{index.name}.unfinished")
        write_file(unfinished, sealed_index(chunks, written, bytes_written, extra))
        os.replace(unfinished, index)
        flush_folder(self._folder)
        return bytes_written


def sealed_index(chunks: Sequence[Chunk], written: Sequence[Written], bytes_written: int, extra: bytes) -> bytes:
    """Return the content of a rank's index."""
    places: dict[str, list[tuple[int, int, int, str]]] = {}  # by tensor: first element, count, offset, seal
    for chunk, (offset, seal) in zip(chunks, written, strict=True):
        places.setdefault(chunk.tensor, []).append((chunk.first, chunk.elements, offset, f"{seal:016x}"))
    of_extra = {"bytes": len(extra), "seal": manifest.seal_of(extra)}
    return manifest.sealed({"chunks": places, "data_bytes": bytes_written, "extra": of_extra})
