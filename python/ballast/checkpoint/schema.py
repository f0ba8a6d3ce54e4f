"""Check the content of a checkpoint's JSON files, which may be damaged or forged, and return it as objects. Needs no
torch."""

from __future__ import annotations

from typing import Any

from ballast import _core
from ballast.checkpoint.contents import (
    FOLDER,
    IDENTITY,
    OUTER,
    PARAMETER_DTYPES,
    ROLES,
    VERSION,
    Checkpoint,
    Extra,
    SavedOptimizer,
    Tensor,
    index_name,
)
from ballast.checkpoint.pieces import Piece
from ballast.checks import fail
from ballast.json_reader import Json, fail_malformed

MOST_DATA_BYTES = 1 << 56  # of a rank's file: sums and products of such numbers stay below 2^63
ALIGNMENT = 64  # of chunks in a file, in bytes
FIRST_ALIGNMENT = 128  # of the first element of a chunk with state
MOST_DIMENSIONS = 64

ITEM_BYTES = {  # of torch's dtypes
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("complex32", "float32", "int32", "uint32"), 4),
    **dict.fromkeys(("complex64", "float64", "int64", "uint64"), 8),
    "complex128": 16,
}
MOMENTS = ("momentum", "variance")


def require_known_format(content: Json) -> None:
    """Raise B1008 for a format that a newer version of Ballast has written."""
    found = content["format"].count()
    if found > VERSION:
        fail(
            "newer_format",
            _core.Problem(
                what=f"cannot read a checkpoint of format {found}: Ballast {content.get('written_by', '').text()} wrote it",
                where=content.file,
                needed=f"format {VERSION} or older",
            ),
        )


def checkpoint_of(content: Json) -> Checkpoint:
    """Return the checkpoint that a manifest describes, without the pieces of its tensors."""
    require_known_format(content)
    optimizers = [content, *(content["others"].elements() if content["format"].count() > 1 else ())]
    step, skipped = (max(each[kind].count() for each in optimizers) for kind in ("step", "skipped"))
    tensors = {name: _tensor(entry, step, skipped) for name, entry in content["tensors"].items()}
    indexes = [_index(entry, rank) for rank, entry in enumerate(content["indexes"].elements())]
    if content["ranks"].count() != len(indexes) or not indexes:
        content["ranks"].refuse(f"{len(indexes)}, the number of indexes, and at least 1")
    folder = content["folder"]
    if not FOLDER.fullmatch(folder.text()):
        folder.refuse("the name of a folder next to the manifest, such as step-12-8c31f0a2")
    saved = [_optimizer(each, tensors) for each in optimizers]
    names = [name for each in saved for name in each.parameters]
    if len(saved) > 1 and len(set(names)) < len(names):
        fail_malformed(content.file, "a parameter is in the groups of two optimizers")
    return Checkpoint(
        ranks=len(indexes),
        folder=folder.text(),
        optimizers=saved,
        tensors=tensors,
        indexes=indexes,
        converted_from=content.get("converted_from", "").text(),
        written_by=content.get("written_by", "").text(),
    )


def _optimizer(content: Json, tensors: dict[str, Tensor]) -> SavedOptimizer:
    identity = content.get("outer_identity", "")
    if not IDENTITY.fullmatch(identity.text()):
        identity.refuse("16 hexadecimal digits, or nothing")
    return SavedOptimizer(
        step=content["step"].count(),
        skipped=content["skipped"].count(),
        optimizer=content["optimizer"].text(),
        moments={kind: name.text() for kind, name in content["moments"].items() if _is_moment(kind, name)},
        groups=[_group(entry, tensors) for entry in content["groups"].elements()],
        own_step=content.get("own_step", False).flag(),
        outer_identity=identity.text(),
    )


def _is_moment(kind: str, name: Json) -> bool:
    if kind not in MOMENTS:
        fail_malformed(name.file, f"moments names {kind}", needed=" or ".join(MOMENTS))
    return True


def _tensor(entry: Json, step: int, skipped: int) -> Tensor:
    role = entry["role"].text(ROLES)
    found = Tensor(
        role=role,
        dtype=entry["dtype"].text(ITEM_BYTES),
        item_bytes=entry["item_bytes"].count(),
        shape=entry["shape"].counts(),
        momentum=entry.get("momentum", False).flag(),
        variance=entry.get("variance", False).flag(),
        steps=entry.get("steps", 0).count(step + skipped if role == OUTER else step),
    )
    if found.item_bytes != ITEM_BYTES[found.dtype]:
        entry["item_bytes"].refuse(f"{ITEM_BYTES[found.dtype]}, for {found.dtype}")
    if len(found.shape) > MOST_DIMENSIONS or found.elements > MOST_DATA_BYTES:
        entry["shape"].refuse("the shape of a tensor that fits into files")
    if found.role == "trained":
        entry["dtype"].text(PARAMETER_DTYPES)
        found.format = entry["format"].text([known.name for known in _core.StateFormat])
    elif entry.get("format", None).value is not None or found.momentum or found.variance:
        fail_malformed(entry.file, f"{entry.at} has a state, and is not trained")
    return found


def _index(entry: Json, rank: int) -> dict[str, Any]:
    entry["seal"].seal()
    return {"file": entry["file"].text([index_name(rank)]), "seal": entry["seal"].text()}


def _group(entry: Json, tensors: dict[str, Tensor]) -> dict[str, Any]:
    names = entry["parameters"].elements()
    for name in names:
        if name.text() not in tensors:
            name.refuse("the name of a tensor")
    options = dict(entry["options"].items())
    if "params" in options:
        options["params"].refuse("no option of this name: it holds the parameters of a group")
    return {"parameters": [name.text() for name in names], "options": {key: each.value for key, each in options.items()}}


def extra_of(index: Json) -> Extra:
    """Return the description of a rank's `extra` in its index."""
    extra = index["extra"]
    extra["seal"].seal()
    return Extra(extra["bytes"].count(MOST_DATA_BYTES), extra["seal"].text())


def pieces_of(index: Json, rank: int, tensors: dict[str, Tensor]) -> dict[str, list[Piece]]:
    """Return the pieces in a rank's index, by tensor. Each lies in the rank's data, and no two overlap."""
    data_bytes = index["data_bytes"].count(MOST_DATA_BYTES)
    found: dict[str, list[Piece]] = {}
    for name, chunks in index["chunks"].items():
        if name not in tensors:
            fail_malformed(index.file, f"it has chunks of {name}, which is no tensor of the checkpoint")
        found[name] = [_piece(chunk, rank, tensors[name], data_bytes) for chunk in chunks.elements()]
    end = 0
    for piece in sorted((piece for pieces in found.values() for piece in pieces), key=lambda each: each.offset):
        if piece.offset < end:
            fail_malformed(index.file, f"two chunks overlap at byte {piece.offset}")
        end = piece.offset + piece.bytes
    return found


def _piece(chunk: Json, rank: int, tensor: Tensor, data_bytes: int) -> Piece:
    first, count, offset, seal = chunk.elements(4)
    if count.count() > data_bytes:  # an element has at least a byte; a larger number may overflow below
        chunk.refuse("a chunk of this rank's data")
    piece = Piece(first.count(), count.count(), rank, offset.count(), tensor.chunk_bytes(count.count()), seal.seal())
    if piece.offset + piece.bytes > data_bytes or piece.offset % ALIGNMENT != 0:
        offset.refuse(f"a chunk of {piece.bytes} bytes in the {data_bytes} bytes of this rank's data")
    if tensor.role == "trained" and piece.first % FIRST_ALIGNMENT != 0:
        first.refuse(f"a multiple of {FIRST_ALIGNMENT}")
    return piece
