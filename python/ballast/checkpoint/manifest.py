"""Read and write the JSON files that describe a checkpoint. Needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ballast import _core
from ballast.checkpoint.pieces import Piece, in_order
from ballast.checks import fail, refuse
from ballast.errors import Error

VERSION = 1
MANIFEST = "checkpoint.json"
RUN_FOLDER = re.compile(r"(.+)-rank-\d+")  # of wrap(run=...)
READS = 5  # attempts to read a checkpoint that other jobs replace meanwhile

PARAMETER_DTYPES = {"float32": _core.DType.fp32, "bfloat16": _core.DType.bf16, "float16": _core.DType.fp16}

# Roles of a custom optimizer's state: a tensor with a value for each element, another tensor, a number.
CUSTOM = ("own", "own tensor", "own number")
OUTER = "outer"  # what the outer optimizer keeps of a parameter
ROLES = ("trained", "frozen", "buffer", "moment", *CUSTOM, OUTER)


@dataclass
class Tensor:
    """A parameter with its state, or another tensor of the model or the optimizer."""

    role: str  # one of ROLES
    dtype: str  # with torch's name
    item_bytes: int
    shape: list[int]
    format: str | None = None  # of a trained parameter's state, and which moments it has
    momentum: bool = False
    variance: bool = False
    steps: int = 0  # number of steps that have trained it
    pieces: list[Piece] = field(default_factory=list)  # in order; the ranks' own files list them, not the manifest

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def is_parameter(self) -> bool:
        return self.role in ("trained", "frozen")

    def kind(self) -> _core.ChunkKind:
        return _core.ChunkKind(
            parameter=PARAMETER_DTYPES[self.dtype],
            format=None if self.format is None else _core.StateFormat[self.format],
            momentum=self.momentum,
            variance=self.variance,
        )

    def chunk_bytes(self, elements: int) -> int:
        return self.kind().bytes(elements) if self.role == "trained" else elements * self.item_bytes


@dataclass
class Checkpoint:
    """Everything about a checkpoint except the values of its tensors."""

    step: int
    skipped: int
    ranks: int
    folder: str  # next to the manifest, with the files of this checkpoint
    optimizer: str  # its class
    moments: dict[str, str]  # torch's names of "momentum" and "variance", as far as the optimizer has them
    groups: list[dict[str, Any]]  # "parameters": names; "options"
    tensors: dict[str, Tensor]
    indexes: list[dict[str, Any]]  # the name and the seal of each rank's file
    own_step: bool = False  # the optimizer's own step makes the updates, with state of its own
    written_by: str = _core.version
    format: int = VERSION
    extra_seals: list[str] = field(default_factory=list)  # by rank; the ranks' own files hold them

    def to_json(self) -> bytes:
        content = asdict(self)
        del content["extra_seals"]
        for tensor in content["tensors"].values():
            del tensor["pieces"]
        return sealed(content)


def index_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


def data_name(rank: int) -> str:
    return f"rank-{rank:05}.data"


def extra_name(rank: int) -> str:
    return f"rank-{rank:05}.extra"


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
        read = json.loads(text)
        content = read["content"]
        if read["seal"] == seal_of(_canonical(content)):
            return content
    except (ValueError, KeyError, TypeError):
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
    try:
        return (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        _refuse_without_checkpoint(directory)
    except OSError as error:
        _fail_unreadable(directory / MANIFEST, error)


def runs_in(directory: Path) -> list[str]:
    """Return the names of the runs whose state is in this directory; offload/FORMAT.md describes it."""
    found = [RUN_FOLDER.fullmatch(path.parent.name) for path in directory.glob("*-rank-*/state.records")]
    return sorted({match[1] for match in found if match})


def _refuse_without_checkpoint(directory: Path) -> NoReturn:
    own = RUN_FOLDER.fullmatch(directory.absolute().name) if (directory / "state.records").exists() else None
    of_runs = directory.absolute().parent if own else directory
    runs = [own[1]] if own else runs_in(directory)
    remedy = "" if directory.is_dir() else "Check the path: there is no such directory."
    hosts = sorted(path.parent.name for path in directory.glob(f"host-*/{MANIFEST}"))
    if hosts:
        remedy = "Name one of these folders; or load them all in a training with wrap(outer=...)."
    if runs:
        remedy = f'The run resumes with wrap(..., offload="nvme:{of_runs}", run="{runs[0]}").'
    refuse(
        f"cannot load a checkpoint: there is none in {directory}",
        needed=f"a directory of ballast.save(), which holds a {MANIFEST}",
        available=f"a run: {', '.join(runs)}" if runs else ", ".join(hosts),
        remedy=remedy,
    )


def content_in(directory: Path) -> Mapping[str, Any] | None:
    """Return the content of the manifest: empty where there is none, None where it cannot be read."""
    path = directory / MANIFEST
    try:
        content: Mapping[str, Any] = unsealed(read_bytes(path), str(path)) if path.exists() else {}
        return content
    except (Error, OSError):
        return None


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
    checkpoint = _checkpoint_of(text, directory / MANIFEST)
    pieces: dict[str, list[Piece]] = {name: [] for name in checkpoint.tensors}
    for rank, index in enumerate(checkpoint.indexes):
        path = directory / checkpoint.folder / index["file"]
        text = read_bytes(path)
        require_sealed(text, index["seal"], path)
        content = unsealed(text, str(path))
        checkpoint.extra_seals.append(content["extra"]["seal"])
        for name, chunks in content["chunks"].items():
            tensor = checkpoint.tensors[name]
            for first, count, offset, seal in chunks:
                pieces[name].append(Piece(first, count, rank, offset, tensor.chunk_bytes(count), int(seal, 16)))
    for name, tensor in checkpoint.tensors.items():
        tensor.pieces = in_order(name, tensor.elements, pieces[name])
    return checkpoint


def _checkpoint_of(text: bytes, path: Path) -> Checkpoint:
    content = unsealed(text, str(path))
    if content["format"] > VERSION:
        fail(
            "newer_format",
            _core.Problem(
                what=f"cannot read a checkpoint of format {content['format']}: Ballast {content['written_by']} wrote it",
                where=str(path),
                needed=f"format {VERSION} or older",
            ),
        )
    tensors = {name: Tensor(**tensor) for name, tensor in content.pop("tensors").items()}
    return Checkpoint(**content, tensors=tensors)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
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
