"""Tensors in files, read piece by piece into memory that is already there.

The package `safetensors` is not used: it maps files, whose pages stay in memory, and it reads whole tensors.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import NoReturn

import torch

from ballast.checks import fail_of_system, refuse
from ballast.json_reader import Json, fail_malformed, parse, read_json
from ballast.safetensors_format import DTYPES, INDEX
from ballast.torch.memory import bytes_at, tensor_at


class StoredTensor(ABC):
    """Reads a tensor piece by piece, into memory that is already there."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], where: str):
        self.dtype = dtype
        self.shape = shape
        self.where = where  # the file or the directory, for messages

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * int(self.dtype.itemsize)

    @abstractmethod
    def read(self, first: int, count: int, into: int) -> None:
        """Read elements to this address."""

    def in_format(self, dtype: torch.dtype) -> StoredTensor:
        """Return the tensor in another format."""
        return CastTensor(self, dtype)

    def read_part(self, first: int, count: int) -> torch.Tensor:
        """Return elements in a flat tensor."""
        values = torch.empty(count, dtype=self.dtype, device="cpu")
        self.read(first, count, values.data_ptr())
        return values

    def read_all(self) -> torch.Tensor:
        return self.read_part(0, self.elements).view(self.shape)


class CastTensor(StoredTensor):
    """A stored tensor whose values are rounded to another format when they are read."""

    def __init__(self, stored: StoredTensor, dtype: torch.dtype):
        super().__init__(dtype, stored.shape, stored.where)
        self._stored = stored

    def read(self, first: int, count: int, into: int) -> None:
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(self._stored.read_part(first, count))


Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
MOST_DIMENSIONS = 64  # torch's limit


class OpenFile:
    """A file that is closed when nothing refers to it."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            fail_of_system(error)
        self.bytes = os.fstat(self._file.fileno()).st_size

    def read(self, begin: int, into: memoryview) -> None:
        while into:
            count = self._read_some(begin, into)
            if count == 0:
                fail_malformed(str(self.path), "it has become shorter since it was opened")
            into, begin = into[count:], begin + count

    def _read_some(self, begin: int, into: memoryview) -> int:
        try:
            return os.preadv(self._file.fileno(), [into], begin)
        except OSError as error:
            fail_of_system(OSError(error.errno, error.strerror, str(self.path)))


class SafetensorsTensor(StoredTensor):
    """A tensor in a safetensors file."""

    def __init__(self, file: OpenFile, begin: int, dtype: torch.dtype, shape: tuple[int, ...]):
        super().__init__(dtype, shape, str(file.path))
        self._file = file
        self.begin = begin  # the offset in the file

    @property
    def end(self) -> int:
        return self.begin + self.bytes

    def read(self, first: int, count: int, into: int) -> None:
        width = self.dtype.itemsize
        self._file.read(self.begin + first * width, bytes_at(into, count * width))


def tensors_in(files: Files) -> dict[str, SafetensorsTensor]:
    """Return the tensors by name. Reads only headers."""
    found: dict[str, SafetensorsTensor] = {}
    for path, listed in _paths(files):
        here = _header(OpenFile(path))
        for name in listed - here.keys():
            fail_malformed(str(path.parent / INDEX), f"{name} is not in {path.name}", needed="an index of these files")
        for name, tensor in here.items():
            if name in found:
                refuse(
                    f'cannot read "{name}": it is in more than one file',
                    where=f"{found[name].where} and {path}",
                    needed="the files of one checkpoint",
                )
            found[name] = tensor
    return found


def _paths(files: Files) -> Iterator[tuple[Path, set[str]]]:
    """Yield the files that a file name, an index, a directory, a pattern, or several of these name, with the names of the
    tensors that an index lists there."""
    if not isinstance(files, (str, os.PathLike)):
        for each in files:
            yield from _paths(each)
        return
    path = Path(files)
    if path.is_dir():
        index = path / INDEX
        yield from _paths(index if index.exists() else path / "*.safetensors")
        return
    if path.suffix == ".json" and path.exists():
        yield from sorted(_listed(path).items())
        return
    paths = [path] if path.exists() else [Path(found) for found in sorted(glob(str(path)))]
    if not paths:
        refuse(f"no file matches {files}", needed='safetensors files, such as "model/*.safetensors"')
    yield from ((each, set()) for each in paths)


def _listed(index: Path) -> dict[Path, set[str]]:
    """Return the names in each file, as an index lists them. Files are next to the index."""
    found: dict[Path, set[str]] = {}
    for name, where in Json(read_json(index), str(index))["weight_map"].items():
        file = where.text()
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            where.refuse("the name of a file next to the index")
        if not (index.parent / file).is_file():
            fail_malformed(str(index), f"{file}, which it names, is not there")
        found.setdefault(index.parent / file, set()).add(name)
    return found


def _header(file: OpenFile) -> dict[str, SafetensorsTensor]:
    """Return the tensors of a file. Each byte after the header belongs to one of them, as the format demands."""
    data, entries = _entries(file)
    found = {name: _tensor(file, data, entry) for name, entry in entries.items() if name != "__metadata__"}
    end, last = data, ""
    for name, tensor in sorted(found.items(), key=lambda each: (each[1].begin, each[1].end)):
        if tensor.begin != end:
            relation = f"overlaps with {last}" if tensor.begin < end else "does not begin where the last tensor ends"
            fail_malformed(str(file.path), f"{name} {relation}")
        end, last = tensor.end, name
    if end > file.bytes:
        fail_malformed(
            str(file.path), f"it is cut off inside of {last}", needed=f"{end} bytes", available=f"{file.bytes} bytes"
        )
    if end < file.bytes:
        fail_malformed(str(file.path), f"no tensor has the {file.bytes - end} bytes at the end of it")
    return found


def _entries(file: OpenFile) -> tuple[int, Json]:
    """Return the place of the first byte after the header, and the header."""
    prefix = bytearray(min(8, file.bytes))
    file.read(0, memoryview(prefix))
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or 8 + size > file.bytes:
        _refuse_other_file(file, "it ends before its header does")
    if size > MOST_HEADER_BYTES:
        fail_malformed(
            str(file.path), f"it has a header of {size:,} bytes", needed=f"at most {MOST_HEADER_BYTES:,}, as in safetensors"
        )
    text = bytearray(size)
    file.read(8, memoryview(text))
    try:
        content = parse(text)
    except ValueError as error:
        _refuse_other_file(file, str(error))
    if not isinstance(content, dict):
        _refuse_other_file(file, "its header is no JSON object")
    return 8 + size, Json(content, str(file.path))


def _refuse_other_file(file: OpenFile, why: str) -> NoReturn:
    refuse(
        f"cannot read {file.path}: it is no safetensors file",
        where=why,
        needed="a header in JSON after 8 bytes with its length",
    )


def _tensor(file: OpenFile, data: int, entry: Json) -> SafetensorsTensor:
    name = entry["dtype"].text()
    if name not in DTYPES:
        refuse(
            f"cannot read a tensor that holds {name}", where=f"{entry.at} in {file.path}", needed=f"one of {', '.join(DTYPES)}"
        )
    if len(entry["shape"].elements()) > MOST_DIMENSIONS:
        entry["shape"].refuse(f"at most {MOST_DIMENSIONS} dimensions")
    begin, end = (offset.count() for offset in entry["data_offsets"].elements(2))
    tensor = SafetensorsTensor(file, data + begin, getattr(torch, DTYPES[name]), tuple(entry["shape"].counts()))
    if tensor.bytes != end - begin:
        fail_malformed(str(file.path), f"{entry.at} has {end - begin} bytes", needed=f"{tensor.bytes}, for its shape and dtype")
    return tensor
