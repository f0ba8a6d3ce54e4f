"""The manifest of a checkpoint, which may be damaged or forged, and its content as objects. Read, check and write it, and
compare the data with its checksums. FORMAT.md describes the files; zero/checkpoint reads those of the ranks. Needs no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from ballast import _core
from ballast.checkpoint.kinds import MANIFEST, refuse_without_checkpoint
from ballast.checks import fail
from ballast.errors import Error
from ballast.json_reader import MOST_BYTES, Json, fail_malformed
from ballast.json_reader import parse as parse_json

Result = TypeVar("Result")
VERSION = 1
IN_CPP = "a training in C++"  # what such a checkpoint is converted from: it has no groups
FOLDER = re.compile(r"step-[0-9]+-[0-9a-f]{8}")
IDENTITY = re.compile(r"([0-9a-f]{16})?")  # it belongs to a training with an outer optimizer
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


@dataclass
class SavedOptimizer:
    """An optimizer of a checkpoint, without its tensors."""

    step: int
    skipped: int
    optimizer: str  # its class
    moments: dict[str, str]  # torch's names of "momentum" and "variance", as far as it has them
    groups: list[dict[str, Any]]  # "parameters": names; "options"
    own_step: bool = False  # its own step makes the updates, with state of its own
    outer_identity: str = ""  # names a training on several hosts with an outer optimizer; the same on all of them

    @property
    def parameters(self) -> list[str]:
        return [name for group in self.groups for name in group["parameters"]]


@dataclass
class Checkpoint:
    """Everything about a checkpoint except the values of its tensors."""

    ranks: int
    folder: str  # the folder next to the manifest with the files of this checkpoint
    optimizers: list[SavedOptimizer]  # there is at least one
    tensors: dict[str, _core.SavedTensor]
    indexes: list[dict[str, Any]]  # the name and the seal of each rank's file
    converted_from: str = ""  # what `ballast convert` has read. Then there are no groups, and untrained tensors may be missing
    written_by: str = _core.version
    extras: list[_core.SavedExtra] = field(default_factory=list)  # one for each rank; the ranks' own files describe them
    files: list[str] = field(default_factory=list)  # with the chunks of each rank
    fetch: Callable[[Sequence[_core.Piece]], None] = lambda wanted: None  # gets what is not in the files yet

    @property
    def step(self) -> int:
        """The most steps that an optimizer has made."""
        return max(each.step for each in self.optimizers)

    def reader(self, wanted: Sequence[_core.Piece]) -> _core.PieceReader:
        """Return what reads these pieces in their order."""
        self.fetch(wanted)
        return _core.PieceReader(self.files, wanted)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the manifest, to which the fields of the first optimizer belong."""
        first, *others = (asdict(each) for each in self.optimizers)
        return {
            "format": VERSION,
            **{key: getattr(self, key) for key in ("ranks", "folder", "indexes", "converted_from", "written_by")},
            **first,
            "tensors": {name: _described(tensor) for name, tensor in self.tensors.items()},
            "others": others,
        }


def _described(tensor: _core.SavedTensor) -> dict[str, Any]:
    kind = tensor.kind
    return {
        **{key: getattr(tensor, key) for key in ("role", "dtype", "item_bytes", "shape", "steps")},
        "format": None if kind is None or kind.format is None else kind.format.name,
        "momentum": kind is not None and kind.momentum,
        "variance": kind is not None and kind.variance,
    }


def rank_file(rank: int, kind: str) -> str:
    """Return the name of a rank's file: its index is "json", its chunks are "data", and its `extra` is "extra"."""
    return f"rank-{rank:05}.{kind}"


READS = 5  # attempts to read a checkpoint that other jobs replace meanwhile
MOMENTS = ("momentum", "variance")


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return the text of a file with this content and its checksum.

    >>> unsealed(sealed({"step": 3}), "here")
    {'step': 3}
    >>> unsealed(sealed({"step": 3}).replace(b"3", b"4", 1), "here")
    Traceback (most recent call last):
    ballast.errors.FailureError: B3202 a file of the checkpoint is not what was written
      where:     here
    ...
    """
    text = _canonical(content)
    return b'{"content": ' + text + b', "seal": "' + seal_of(text).encode() + b'"}\n'


def unsealed(text: bytes, where: str) -> Any:
    """Return the content of a file. Raise B3202 where it does not match its checksum."""
    try:
        read = parse_json(text)
        content = read["content"]
        if read["seal"] == seal_of(_canonical(content)):
            return content
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    _fail_changed(where)


def _fail_changed(where: str) -> NoReturn:
    fail("bad_record", "a file of the checkpoint is not what was written", where=where)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def seal_of(text: bytes) -> str:
    return f"{_core.checksum(text):016x}"


# --- Reading ---


def read(directory: str | Path) -> Checkpoint:
    """Return the checkpoint in a directory, with all pieces of all tensors. Raise an error that names the fault."""
    path = Path(directory)
    return current(partial(read_text, path), partial(parse, path), path)


def current(read_manifest: Callable[[], bytes], use: Callable[[bytes], Result], where: Path | str) -> Result:
    """Return what `use` makes of the manifest, and of the files that it names. A saving may replace the manifest meanwhile, and
    remove the files: then the new checkpoint is used."""
    for _ in range(READS):
        text = read_manifest()
        try:
            return use(text)
        except (Error, OSError):
            if read_manifest() == text:
                raise
    fail_replaced(where)


def read_text(directory: Path) -> bytes:
    """Return the manifest as it is now. Raise B1001 where there is no checkpoint."""
    path = directory / MANIFEST
    return read_bytes(path) if _is_there(path) else refuse_without_checkpoint(directory)


def read_content(directory: Path) -> Mapping[str, Any]:
    """Return the content of the manifest: empty where there is none. Raise an error where it cannot be read."""
    path = directory / MANIFEST
    if not _is_there(path):
        return {}
    found: Mapping[str, Any] = unsealed(read_bytes(path), str(path))
    content = Json(found, str(path))
    content["folder"].text(), content["step"].count(), dict(content["tensors"].items())
    return found


def content_in(directory: Path) -> Mapping[str, Any] | None:
    """Return the content of the manifest: empty where there is none, None where it cannot be read."""
    try:
        return read_content(directory)
    except Error:
        return None


def _is_there(path: Path) -> bool:
    """Return whether a file exists. Raise an error where that is unknown: Path.exists() returns False there since Python 3.14,
    so a checkpoint on a file system that fails for a moment would be taken for none, and be removed."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        fail_file(path, error)
    return True


def folder_in(directory: Path) -> str | None:
    """Return the folder that the manifest names: empty where there is none, None where it cannot be read."""
    content = content_in(directory)
    return None if content is None else str(content.get("folder", ""))


def fail_replaced(directory: Path | str) -> NoReturn:
    fail(
        "directory_in_use",
        f"cannot read a checkpoint: another job has replaced it {READS} times meanwhile",
        where=str(directory),
        remedy="Read it when jobs save less often, or read a copy.",
    )


class Outline(NamedTuple):
    """What a manifest says before the files that it names are there."""

    folder: str
    ranks: int
    step: int

    @staticmethod
    def of(text: bytes, where: str) -> Outline:
        content = content_of(text, where)
        folder = content["folder"]
        if not FOLDER.fullmatch(folder.text()):
            folder.refuse("the name of a folder next to the manifest, such as step-12-8c31f0a2")
        steps = [each["step"].count() for each in (content, *content["others"].elements())]
        return Outline(folder.text(), len(content["indexes"].elements()), max(steps))


def content_of(text: bytes, where: str) -> Json:
    """Return the content of a manifest. Raise B1008 for a format that a newer version of Ballast has written."""
    content = Json(unsealed(text, where), where)
    found = content["format"].count()
    if found > VERSION:
        fail(
            "newer_format",
            f"cannot read a checkpoint of format {found}: Ballast {content.get('written_by', '').text()} wrote it",
            where=where,
            needed=f"format {VERSION}",
        )
    return content


def parse(directory: Path, text: bytes) -> Checkpoint:
    """Return the checkpoint of this manifest, with the pieces that the ranks' own files name."""
    content = content_of(text, str(directory / MANIFEST))
    optimizers = [content, *content["others"].elements()]
    folder, tensors, extras, files = _core.parse_checkpoint(str(directory), text)
    step, skipped = (max(each[kind].count() for each in optimizers) for kind in ("step", "skipped"))
    for name, tensor in tensors.items():
        content["tensors"][name]["steps"].count(step + skipped if tensor.role == OUTER else step)
    saved = [_optimizer(each, tensors) for each in optimizers]
    names = [name for each in saved for name in each.parameters]
    if len(saved) > 1 and len(set(names)) < len(names):
        fail_malformed(content.file, "a parameter is in the groups of two optimizers")
    return Checkpoint(
        ranks=len(files),
        folder=folder,
        optimizers=saved,
        tensors=tensors,
        indexes=content["indexes"].value,
        converted_from=content["converted_from"].text(),
        written_by=content["written_by"].text(),
        extras=extras,
        files=files,
    )


@dataclass(frozen=True)
class LocalCheckpoint:
    """The checkpoint in a directory, whichever it is when it is read."""

    path: Path

    def read_text(self) -> bytes:
        return read_text(self.path)

    def parse(self, text: bytes, rank: int) -> Checkpoint:
        """Return the checkpoint of this manifest, for a rank that reads it."""
        return parse(self.path, text)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raise B3202 if it has more than this many bytes."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                _fail_changed(str(path))
            return file.read(most + 1)[:most]
    except OSError as error:
        fail_file(path, error)


def fail_file(path: Path, error: OSError) -> NoReturn:
    fail("file_call", f"cannot read a file of a checkpoint: {error.strerror}", where=str(path))


def _optimizer(content: Json, tensors: Container[str]) -> SavedOptimizer:
    identity = content["outer_identity"]
    if not IDENTITY.fullmatch(identity.text()):
        identity.refuse("16 hexadecimal digits, or nothing")
    return SavedOptimizer(
        step=content["step"].count(),
        skipped=content["skipped"].count(),
        optimizer=content["optimizer"].text(),
        moments={kind: name.text() for kind, name in content["moments"].items() if _is_moment(kind, name)},
        groups=[_group(entry, tensors) for entry in content["groups"].elements()],
        own_step=content["own_step"].flag(),
        outer_identity=identity.text(),
    )


def _is_moment(kind: str, name: Json) -> bool:
    if kind not in MOMENTS:
        fail_malformed(name.file, f"moments names {kind}", needed=" or ".join(MOMENTS))
    return True


def _group(entry: Json, tensors: Container[str]) -> dict[str, Any]:
    names = entry["parameters"].elements()
    for name in names:
        if name.text() not in tensors:
            name.refuse("the name of a tensor")
    options = dict(entry["options"].items())
    if "params" in options:
        options["params"].refuse("no option of this name: it holds the parameters of a group")
    return {"parameters": [name.text() for name in names], "options": {key: each.value for key, each in options.items()}}


def problems_of(directory: str | Path) -> list[str]:
    """Return a line for each problem; an empty list if there is none. Raise an error where the manifest cannot be read.

    A saving may replace the checkpoint and remove its files meanwhile. Then the new checkpoint is read."""
    directory = Path(directory)
    for _ in range(READS):
        checkpoint = read(directory)
        problems = list(problems_in(checkpoint))
        if not problems or folder_in(directory) == checkpoint.folder:
            return problems
    fail_replaced(directory)


def problems_in(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each part of this checkpoint that differs from its checksum."""
    for extra in checkpoint.extras:
        try:
            extra.read()
        except Error as error:
            yield _line(error)
    by_file: dict[int, list[tuple[int, _core.Piece, str]]] = {rank: [] for rank in range(checkpoint.ranks)}
    for name, tensor in checkpoint.tensors.items():
        for piece in tensor.pieces:
            by_file[piece.file].append((piece.offset, piece, name))
    for pieces in by_file.values():
        yield from _problems_of_file(checkpoint, sorted(pieces, key=lambda each: each[0]))


def _problems_of_file(checkpoint: Checkpoint, pieces: list[tuple[int, _core.Piece, str]]) -> Iterator[str]:
    try:
        reader = checkpoint.reader([piece for _, piece, _ in pieces])
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
