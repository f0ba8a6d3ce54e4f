"""Read and write the JSON files that describe a checkpoint. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ballast import _core
from ballast.checkpoint.contents import Checkpoint, Tensor, data_name, extra_name
from ballast.checkpoint.kinds import MANIFEST, refuse_without_checkpoint
from ballast.checkpoint.pieces import Piece, in_order
from ballast.checkpoint.schema import checkpoint_of, extra_of, pieces_of
from ballast.checks import fail
from ballast.errors import Error
from ballast.json_reader import MOST_BYTES, Json
from ballast.json_reader import parse as parse_json

READS = 5  # attempts to read a checkpoint that other jobs replace meanwhile


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


def require_sealed(content: bytes, seal: str, path: Path) -> None:
    if seal_of(content) != seal:
        _fail_changed(str(path))


def _fail_changed(where: str) -> NoReturn:
    fail("bad_record", _core.Problem(what="a file of the checkpoint is not what was written", where=where))


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def seal_of(text: bytes) -> str:
    return f"{_core.checksum(text):016x}"


# --- Reading ---


def read(directory: str | Path) -> Checkpoint:
    """Return the checkpoint in a directory, with all pieces of all tensors. Raise an error that names the
    fault.

    A saving may replace the manifest meanwhile, and remove the files that it names. Then the new checkpoint is read."""
    directory = Path(directory)
    for _ in range(READS):
        text = read_text(directory)
        try:
            return parse(directory, text)
        except Error:
            if read_text(directory) == text:
                raise
    fail_replaced(directory)


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
        _fail_unreadable(path, error)
    return True


def folder_in(directory: Path) -> str | None:
    """Return the folder that the manifest names: empty where there is none, None where it cannot be read."""
    content = content_in(directory)
    return None if content is None else str(content.get("folder", ""))


def fail_replaced(directory: Path) -> NoReturn:
    fail(
        "directory_in_use",
        _core.Problem(
            what=f"cannot read a checkpoint: another job has replaced it {READS} times meanwhile",
            where=str(directory),
            remedy="Read it when jobs save less often, or read a copy.",
        ),
    )


def parse(directory: Path, text: bytes) -> Checkpoint:
    """Return the checkpoint of this manifest, with the pieces that the ranks' own files name."""
    path = directory / MANIFEST
    checkpoint = checkpoint_of(Json(unsealed(text, str(path)), str(path)))
    _require_folder(directory, checkpoint.folder)
    pieces: dict[str, list[Piece]] = {name: [] for name in checkpoint.tensors}
    for rank, entry in enumerate(checkpoint.indexes):
        path = directory / checkpoint.folder / entry["file"]
        text = read_bytes(path)
        require_sealed(text, entry["seal"], path)
        index = Json(unsealed(text, str(path)), str(path))
        checkpoint.extras.append(extra_of(index))
        for name, here in pieces_of(index, rank, checkpoint.tensors).items():
            pieces[name] += here
    for name, tensor in checkpoint.tensors.items():
        tensor.pieces = in_order(name, tensor.elements, pieces[name])
    return checkpoint


def _require_folder(directory: Path, folder: str) -> None:
    if not (directory / folder).is_dir():
        fail(
            "file_call",
            _core.Problem(
                what=f"cannot read a checkpoint: the folder {folder}, which its {MANIFEST} names, is not there",
                where=str(directory),
                remedy=f"Copy or move a checkpoint with all its files: {MANIFEST} and that folder.",
            ),
        )


def read_extra(directory: Path, checkpoint: Checkpoint, rank: int) -> tuple[Path, bytes]:
    """Return the file with the `extra` of a rank that saved, and its content, which has its checksum."""
    path, extra = directory / checkpoint.folder / extra_name(rank), checkpoint.extras[rank]
    content = read_bytes(path, extra.bytes)
    require_sealed(content, extra.seal, path)
    return path, content


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raise B3202 if it has more than this many bytes."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                _fail_changed(str(path))
            return file.read(most + 1)[:most]
    except OSError as error:
        _fail_unreadable(path, error)


def _fail_unreadable(path: Path, error: OSError) -> NoReturn:
    fail("file_call", _core.Problem(what=f"cannot read a file of a checkpoint: {error.strerror}", where=str(path)))


def data_files(directory: str | Path, checkpoint: Checkpoint) -> list[str]:
    """Return the data file of each rank."""
    return [str(Path(directory) / checkpoint.folder / data_name(rank)) for rank in range(checkpoint.ranks)]


def pieces_by_file(tensors: Sequence[Tensor]) -> list[Piece]:
    """Return all pieces in the order in which they are on the drive."""
    pieces = [piece for tensor in tensors for piece in tensor.pieces]
    return sorted(pieces, key=lambda piece: (piece.file, piece.offset))
