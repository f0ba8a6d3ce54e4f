"""The content of a checkpoint's JSON files, as objects, and which chunk holds which elements of a tensor. FORMAT.md describes
the files. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ballast import _core
from ballast.checks import fail

VERSION = 1
FOLDER = re.compile(r"step-[0-9]+-[0-9a-f]{8}")
IDENTITY = re.compile(r"([0-9a-f]{16})?")  # of a training with an outer optimizer
PARAMETER_DTYPES = {"float32": _core.DType.fp32, "bfloat16": _core.DType.bf16, "float16": _core.DType.fp16}

# Roles of a custom optimizer's state: a tensor with a value for each element, another tensor, a number.
CUSTOM = ("own", "own tensor", "own number")
OUTER = "outer"  # what the outer optimizer keeps of a parameter
ROLES = ("trained", "frozen", "buffer", "moment", *CUSTOM, OUTER)


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


@dataclass(frozen=True)
class Extra:
    """The file with the `extra` of a rank."""

    bytes: int
    seal: str


@dataclass
class SavedOptimizer:
    """An optimizer of a checkpoint, without its tensors."""

    step: int
    skipped: int
    optimizer: str  # its class
    moments: dict[str, str]  # torch's names of "momentum" and "variance", as far as it has them
    groups: list[dict[str, Any]]  # "parameters": names; "options"
    own_step: bool = False  # its own step makes the updates, with state of its own
    outer_identity: str = ""  # of a training on several hosts with an outer optimizer; the same on all of them

    @property
    def parameters(self) -> list[str]:
        return [name for group in self.groups for name in group["parameters"]]


@dataclass
class Checkpoint:
    """Everything about a checkpoint except the values of its tensors."""

    ranks: int
    folder: str  # next to the manifest, with the files of this checkpoint
    optimizers: list[SavedOptimizer]  # at least one
    tensors: dict[str, Tensor]
    indexes: list[dict[str, Any]]  # the name and the seal of each rank's file
    converted_from: str = ""  # what `ballast convert` has read. Then there are no groups, and untrained tensors may be missing
    written_by: str = _core.version
    extras: list[Extra] = field(default_factory=list)  # by rank; the ranks' own files describe them

    @property
    def step(self) -> int:
        """The most steps that an optimizer has made."""
        return max(each.step for each in self.optimizers)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the manifest, to which the fields of the first optimizer belong."""
        content = asdict(self)
        del content["extras"]
        for tensor in content["tensors"].values():  # the ranks' own files list the pieces
            del tensor["pieces"]
        first, *others = content.pop("optimizers")
        return {"format": VERSION, **content, **first, "others": others}


def rank_file(rank: int, kind: str) -> str:
    """Return the name of a rank's file: its index is "json", its chunks are "data", and its `extra` is "extra"."""
    return f"rank-{rank:05}.{kind}"
