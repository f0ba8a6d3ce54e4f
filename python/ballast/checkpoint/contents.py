"""The content of a checkpoint's JSON files, as objects. FORMAT.md describes it. Needs no torch."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ballast import _core
from ballast.checkpoint.pieces import Piece

VERSION = 1
FOLDER = re.compile(r"step-[0-9]+-[0-9a-f]{8}")

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


@dataclass(frozen=True)
class Extra:
    """The file with the `extra` of a rank."""

    bytes: int
    seal: str


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
    converted_from: str = ""  # what `ballast convert` has read. Then there are no groups, and untrained tensors may be missing
    written_by: str = _core.version
    format: int = VERSION
    extras: list[Extra] = field(default_factory=list)  # by rank; the ranks' own files describe them

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        del content["extras"]
        for tensor in content["tensors"].values():  # the ranks' own files list the pieces
            del tensor["pieces"]
        return content


def index_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


def data_name(rank: int) -> str:
    return f"rank-{rank:05}.data"


def extra_name(rank: int) -> str:
    return f"rank-{rank:05}.extra"
