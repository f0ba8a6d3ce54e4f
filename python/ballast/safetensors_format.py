"""The layout of safetensors files, and of a model in several of them as Hugging Face writes it. Pure.

A file is 8 bytes with the length of the header, the header in JSON, and the tensors' bytes, without gaps, in row-major
order.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"  # the index of the only model in a folder
DTYPES = {  # values: torch's names
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Item:
    name: str
    dtype: str  # the format's name
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class File:
    """The layout of one file."""

    name: str
    header: bytes
    begins: dict[str, int]  # the first byte of each tensor in the file
    bytes: int


def files_for(items: Sequence[Item], stem: str, most_bytes: int | None) -> list[File]:
    """Distribute tensors over files in order. No file has more bytes of tensors than `most_bytes`, unless one tensor
    has more.

    >>> items = [Item("a", "F32", (2,), 8), Item("b", "F32", (3,), 12), Item("c", "BF16", (1,), 2)]
    >>> [(file.name, list(file.begins)) for file in files_for(items, "model", 16)]
    [('model-00001-of-00002.safetensors', ['a']), ('model-00002-of-00002.safetensors', ['b', 'c'])]
    """
    parts: list[list[Item]] = [[]]
    for item in items:
        if most_bytes is not None and parts[-1] and sum(each.bytes for each in parts[-1]) + item.bytes > most_bytes:
            parts.append([])
        parts[-1].append(item)
    if len(parts) == 1:
        return [_file(f"{stem}{SUFFIX}", parts[0])]
    names = [f"{stem}-{number + 1:05}-of-{len(parts):05}{SUFFIX}" for number in range(len(parts))]
    return [_file(name, part) for name, part in zip(names, parts)]


def are_files_for(name: str, stem: str) -> bool:
    """Return whether this can be the name of a file of files_for(), for any number of files.

    >>> [are_files_for(f"{name}.safetensors", "model") for name in ("model", "model-00001-of-00002", "model-ema")]
    [True, True, False]
    """
    return re.fullmatch(rf"{re.escape(stem)}(-\d{{5,}}-of-\d{{5,}})?{re.escape(SUFFIX)}", name) is not None


def index_name(stem: str) -> str:
    """Return the name of the index file.

    >>> index_name("model") == INDEX
    True
    """
    return f"{stem}{SUFFIX}.index.json"


def _file(name: str, items: Iterable[Item]) -> File:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for item in items:
        offsets[item.name] = end
        end += item.bytes
        entries[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [offsets[item.name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return File(name, header, {name: len(header) + at for name, at in offsets.items()}, len(header) + end)


def index_of(files: Sequence[File], tensor_bytes: int) -> bytes:
    """Return the text of the index file, which names the file of each tensor."""
    where = {name: file.name for file in files for name in file.begins}
    content = {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
