"""Read tensors of safetensors files piece by piece, into memory that is already there.

The package `safetensors` is not used: it maps files, whose pages stay in memory, and it reads whole tensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch

from ballast.checks import refuse
from ballast.errors import Error
from ballast.safetensors_format import DTYPES, INDEX
from ballast.wrapper.memory import bytes_at

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class OpenFile:
    """A file that is closed when nothing refers to it."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("rb", buffering=0)
        self.bytes = os.fstat(self._file.fileno()).st_size

    def read(self, begin: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._file.fileno(), [into], begin)
            if count == 0:
                refuse(f"cannot read {self.path.name}: it has become shorter since it was opened", where=str(self.path))
            into, begin = into[count:], begin + count


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: OpenFile
    begin: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int, count: int, into: int) -> None:
        """Read elements to this address."""
        width = self.dtype.itemsize
        self.file.read(self.begin + first * width, bytes_at(into, count * width))

    def read_all(self) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(0, values.numel(), values.data_ptr())
        return values


def tensors_in(files: Files) -> dict[str, StoredTensor]:
    """Return the tensors by name. Reads only headers."""
    found: dict[str, StoredTensor] = {}
    for path in _paths(files):
        for name, tensor in _header(OpenFile(path)).items():
            if name in found:
                refuse(
                    f'cannot read "{name}": it is in more than one file',
                    where=f"{found[name].file.path} and {path}",
                    needed="the files of one checkpoint",
                )
            _require_complete(name, tensor)
            found[name] = tensor
    return found


def _paths(files: Files) -> list[Path]:
    """Return the files that a file name, an index, a directory, a pattern, or several of these name."""
    if not isinstance(files, (str, os.PathLike)):
        return [path for each in files for path in _paths(each)]
    path = Path(files)
    if path.is_dir():
        index = path / INDEX
        return _paths(index if index.exists() else path / "*.safetensors")
    if path.suffix == ".json" and path.exists():
        names = json.loads(path.read_text())["weight_map"].values()
        return [path.parent / name for name in sorted(set(names))]
    paths = [path] if path.exists() else [Path(found) for found in sorted(glob(str(path)))]
    if not paths:
        refuse(f"no file matches {files}", needed='safetensors files, such as "model/*.safetensors"')
    return paths


def _header(file: OpenFile) -> dict[str, StoredTensor]:
    try:
        prefix = bytearray(min(8, file.bytes))
        file.read(0, memoryview(prefix))
        data: int = 8 + struct.unpack("<Q", prefix)[0]
        if data > file.bytes:
            raise ValueError
        text = bytearray(data - 8)
        file.read(8, memoryview(text))
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        return {name: _entry(file, data, name, entry) for name, entry in entries.items()}
    except Error:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        refuse(f"cannot read {file.path}: it is no safetensors file", needed="a header in JSON after 8 bytes with its length")


def _entry(file: OpenFile, data: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        refuse(
            f"cannot read a tensor that holds {entry['dtype']}",
            where=f"{name} in {file.path}",
            needed=f"one of {', '.join(DTYPES)}",
        )
    begin, end = (data + int(offset) for offset in entry["data_offsets"])
    stored = StoredTensor(file, begin, getattr(torch, DTYPES[entry["dtype"]]), tuple(int(size) for size in entry["shape"]))
    if begin < data or end - begin != math.prod(stored.shape) * stored.dtype.itemsize:
        raise ValueError
    return stored


def _require_complete(name: str, stored: StoredTensor) -> None:
    end = stored.begin + math.prod(stored.shape) * stored.dtype.itemsize
    if end > stored.file.bytes:
        refuse(
            f"cannot read {stored.file.path.name}: it is cut off",
            where=f"{name} in {stored.file.path}",
            needed=f"{end} bytes",
            available=f"{stored.file.bytes} bytes",
        )
