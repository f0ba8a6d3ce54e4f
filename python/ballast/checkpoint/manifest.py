"""The manifest of a checkpoint. The library reads and writes it (zero/checkpoint, FORMAT.md): here are the parts that are
Python's, and what all readers do where a saving replaces a checkpoint. Needs no torch."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

from ballast import _core
from ballast.checkpoint.kinds import MANIFEST, refuse_without_checkpoint
from ballast.checks import fail
from ballast.errors import Error
from ballast.json_reader import Json, fail_malformed
from ballast.json_reader import parse as parse_json

Result = TypeVar("Result")
IN_CPP = "a training in C++"  # what such a checkpoint is converted from: it has no groups
FOLDER = re.compile(r"step-[0-9]+-[0-9a-f]{8}")
PARAMETER_DTYPES = {"float32": _core.DType.fp32, "bfloat16": _core.DType.bf16, "float16": _core.DType.fp16}

# Roles of a custom optimizer's state: a tensor with a value for each element, another tensor, a number.
CUSTOM = ("own", "own tensor", "own number")
OUTER = "outer"  # what the outer optimizer keeps of a parameter
PARAMETERS = ("trained", "frozen")
ROLES = (*PARAMETERS, "buffer", "moment", *CUSTOM, OUTER)


def slices(elements: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first element and the count of each slice of at most this size.

    >>> list(slices(5, 2))
    [(0, 2), (2, 2), (4, 1)]
    """
    for first in range(0, elements, most):
        yield first, min(most, elements - first)


class Reader(Protocol):
    """Reads elements of a checkpoint's tensors, in the order in which they were announced."""

    def copy(self, name: str, tensor: _core.SavedTensor, first: int, into: _core.StatePart) -> None:
        """Copy elements with their state, or the parameter alone. A part of bytes gets them as they are."""

    def copy_elements(self, name: str, tensor: _core.SavedTensor, elements: tuple[int, int], into: int) -> None:
        """Copy elements without state, as they are. `elements`: the first one, and their number."""


class Checkpoint:
    """A checkpoint to read: everything but the values of its tensors. `where` names its manifest in errors."""

    def __init__(self, saved: _core.SavedCheckpoint, where: str):
        self.step, self.folder, self.ranks = saved.step, saved.folder, saved.ranks
        self.optimizers = saved.optimizers  # there is at least one
        self.options = [options_of(each, where) for each in saved.optimizers]  # those of each parameter group
        self.tensors = saved.tensors
        self.converted_from = saved.converted_from  # not empty: there are no groups, and untrained tensors may be missing
        self.written_by = saved.written_by
        self.extras = saved.extras  # one for each rank
        self.files = saved.files  # with the chunks of each rank, or the records of a run
        self.names: dict[str, str] = {}  # those in a model, where they differ
        self.extra: Any = None  # where the ranks have none
        self.make_files: Callable[[Iterable[int]], None] = lambda numbers: None  # makes those that are not here yet
        self.fetch: Callable[[Sequence[_core.Piece]], None] = lambda wanted: None  # gets what is not in the files yet

    def require_files(self, numbers: Container[int]) -> None:
        """Raise an error where one of these files is missing, or too short for its pieces."""
        last: dict[int, _core.Piece] = {}
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                if piece.file in numbers and (piece.file not in last or piece.offset > last[piece.file].offset):
                    last[piece.file] = piece
        self.make_files(last)
        _core.PieceReader(self.files, [*last.values()])

    def reader(self, wanted: Sequence[_core.Piece] = ()) -> Reader:
        """Return what reads these pieces in their order."""
        self.fetch(wanted)
        return _core.PieceReader(self.files, list(wanted))


def rank_file(rank: int, kind: str) -> str:
    """Return the name of a rank's file: its index is "json", its chunks are "data", and its `extra` is "extra"."""
    return f"rank-{rank:05}.{kind}"


def options_of(saved: _core.SavedOptimizer, file: str) -> list[dict[str, Any]]:
    """Return the options of the parameter groups. Raise B3202 for text that Python has not written."""
    found = []
    for group in saved.groups:
        try:
            options = Json(parse_json(group.options.encode()), file, "options")
        except ValueError as error:
            fail_malformed(file, f"the options of a group: {error}")
        found.append({key: each.value for key, each in options.items()})
        if "params" in found[-1]:
            options["params"].refuse("no option of this name: it holds the parameters of a group")
    return found


def group_of(parameters: Sequence[str], options: dict[str, Any]) -> _core.SavedGroup:
    return _core.SavedGroup(list(parameters), json.dumps(options, sort_keys=True))


def parameters_of(saved: _core.SavedOptimizer) -> list[str]:
    return [name for group in saved.groups for name in group.parameters]


# --- Reading ---

READS = 5  # attempts to read a checkpoint that other jobs replace meanwhile


def outline(directory: Path) -> _core.SavedCheckpoint | None:
    """Return the content of the manifest; None where there is none. The files that it names are not read. Raise an error where
    it cannot be read."""
    text = _core.read_manifest(str(directory))
    return None if text is None else _core.parse_manifest(text, str(directory / MANIFEST))


def outline_in(directory: Path) -> _core.SavedCheckpoint | None:
    """Return what the manifest says: None where there is none, and where it cannot be read."""
    try:
        return outline(directory)
    except Error:
        return None


def fail_replaced(directory: Path | str) -> NoReturn:
    fail(
        "directory_in_use",
        f"cannot read a checkpoint: another job has replaced it {READS} times meanwhile",
        where=str(directory),
        remedy="Read it when jobs save less often, or read a copy.",
    )


def outlined(text: bytes, where: str) -> Checkpoint:
    """Return the checkpoint of this manifest, without the pieces of its tensors."""
    return Checkpoint(_core.parse_manifest(text, where), where)


class Place(ABC):
    """Where a checkpoint is. A saving may replace it while it is read."""

    path: Path | str

    @abstractmethod
    def read_text(self) -> bytes:
        """Return the manifest as it is now. Raise B1001 where there is no checkpoint."""

    @abstractmethod
    def read_indexes(self, text: bytes, rank: int, ranks: int) -> list[bytes]:
        """Return this rank's share of the indexes that the manifest names: all of `ranks` share them in turns."""

    @abstractmethod
    def parse(self, text: bytes, indexes: Sequence[bytes], rank: int) -> Checkpoint:
        """Return the checkpoint of this manifest, with the pieces that all indexes name, for a rank that reads it."""

    def read(self) -> Checkpoint:
        """Return the checkpoint, with all pieces of all tensors. Raise an error that names the fault."""
        return self.current(lambda text: self.parse(text, self.read_indexes(text, 0, 1), 0))

    def current(self, use: Callable[[bytes], Result]) -> Result:
        """Return what `use` makes of the manifest, and of the files that it names. A saving may replace the manifest meanwhile,
        and remove the files: then the new checkpoint is used."""
        for _ in range(READS):
            text = self.read_text()
            try:
                return use(text)
            except (Error, OSError):
                if self.read_text() == text:
                    raise
        fail_replaced(self.path)


@dataclass(frozen=True)
class LocalCheckpoint(Place):
    """The checkpoint in a directory, whichever it is when it is read."""

    path: Path

    def read_text(self) -> bytes:
        text = _core.read_manifest(str(self.path))
        return refuse_without_checkpoint(self.path) if text is None else text

    def read_indexes(self, text: bytes, rank: int, ranks: int) -> list[bytes]:
        saved = _core.parse_manifest(text, str(self.path / MANIFEST))
        return [_core.read_index(str(self.path / saved.folder), number) for number in range(rank, saved.ranks, ranks)]

    def parse(self, text: bytes, indexes: Sequence[bytes] = (), rank: int = 0) -> Checkpoint:
        """Do the same, and read the indexes unless they are given."""
        texts = cast(list[str], list(indexes))  # the library's text may be bytes
        return Checkpoint(_core.parse_checkpoint(str(self.path), text, texts), str(self.path / MANIFEST))


def read(directory: str | Path) -> Checkpoint:
    return LocalCheckpoint(Path(directory)).read()


def fail_file(path: Path, error: OSError) -> NoReturn:
    fail("file_call", f"cannot read a file of a checkpoint: {error.strerror}", where=str(path))


def problems_of(directory: str | Path) -> list[str]:
    """Return a line for each problem; an empty list if there is none. Raise an error where the manifest cannot be read.

    A saving may replace the checkpoint and remove its files meanwhile. Then the new checkpoint is read."""
    directory = Path(directory)
    for _ in range(READS):
        checkpoint = read(directory)
        problems = list(problems_in(checkpoint))
        if not problems or ((now := outline_in(directory)) is not None and now.folder == checkpoint.folder):
            return problems
    fail_replaced(directory)


def problems_in(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each part of this checkpoint that differs from its checksum."""
    for extra in checkpoint.extras:
        try:
            extra.read()
        except Error as error:
            yield _line(error)
    by_file: dict[int, list[tuple[int, _core.Piece, str]]] = {file: [] for file in range(len(checkpoint.files))}
    for name, tensor in checkpoint.tensors.items():
        for piece in tensor.pieces:
            by_file[piece.file].append((piece.offset, piece, name))
    for pieces in by_file.values():
        yield from _problems_of_file(checkpoint, sorted(pieces, key=lambda each: each[0]))


def _problems_of_file(checkpoint: Checkpoint, pieces: list[tuple[int, _core.Piece, str]]) -> Iterator[str]:
    try:
        checkpoint.fetch([piece for _, piece, _ in pieces])
        reader = _core.PieceReader(checkpoint.files, [piece for _, piece, _ in pieces])
    except Error as error:
        yield _line(error)
        return
    for _, piece, name in pieces:
        try:
            reader.go_to(piece, name)
        except Error as error:
            yield _line(error)


def _line(error: Error) -> str:
    return f"{error.code} {error.what_happened}: {error.where}"
