"""Tensors in files, read piece by piece into memory that is already there.

The package `safetensors` is not used: it maps files, whose pages stay in memory, and it reads whole tensors.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ballast import _core
from ballast.checks import fail_of_system, refuse
from ballast.json_reader import fail_malformed
from ballast.ranks import Group
from ballast.safetensors_format import DTYPES, INDEX, SINGLE, SUFFIX
from ballast.torch.memory import bytes_at, tensor_at
from ballast.torch.parts import Part, part_of

Found = TypeVar("Found")


class Source(Protocol):
    """A checkpoint whose indexes are read late, because a file system does not carry N^2 opens for N ranks."""

    manifest: bytes  # empty when the indexes were read

    def read_together(self, group: Group) -> None: ...


class StoredTensor(ABC):
    """Reads a tensor piece by piece, into memory that is already there."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], where: str, source: Source | None = None):
        self.dtype = dtype
        self.shape = shape
        self.where = where  # the file or the directory, for messages
        self.source = source

    @property
    def is_late(self) -> bool:
        return self.source is not None and self.source.manifest != b""

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
        return CastTensor(self, dtype)

    def read_part(self, first: int, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=self.dtype, device="cpu")
        self.read(first, count, values.data_ptr())
        return values

    def read_all(self) -> torch.Tensor:
        return self.read_part(0, self.elements).view(self.shape)


class Latest:
    """Keeps what was read last, because the pieces of a tensor are read one after the other."""

    def __init__(self) -> None:
        self._key: object = None
        self._found: Any = None

    def get(self, key: object, read: Callable[[], Found]) -> Found:
        if self._key != key:
            self._key = self._found = None  # free the last one before the next is read
            self._found = read()
            self._key = key
        found: Found = self._found
        return found


class CastTensor(StoredTensor):
    """A stored tensor whose values are rounded to another format when they are read."""

    def __init__(self, stored: StoredTensor, dtype: torch.dtype):
        super().__init__(dtype, stored.shape, stored.where, stored.source)
        self._stored = stored

    def read(self, first: int, count: int, into: int) -> None:
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(self._stored.read_part(first, count))


class PartOfTensor(StoredTensor):
    """The part of a stored tensor that a parameter is."""

    def __init__(self, stored: StoredTensor, part: Part):
        super().__init__(stored.dtype, part.local_shape, stored.where, stored.source)
        self._stored, self._part = stored, part

    def in_format(self, dtype: torch.dtype) -> StoredTensor:
        return PartOfTensor(self._stored.in_format(dtype), self._part)

    def read(self, first: int, count: int, into: int) -> None:
        for there, some, at in self._part.ranges(first, count):
            self._stored.read(there, some, into + at * self.dtype.itemsize)


def stored_part(stored: StoredTensor, tensor: torch.Tensor) -> StoredTensor:
    """Return the stored elements of a parameter: all, or those of its part of a full tensor."""
    part = part_of(tensor)
    return stored if part is None else PartOfTensor(stored, part)


Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class FileTensor(StoredTensor):
    """A tensor whose elements are one after the other in a file. The file is open only while it is read: a checkpoint may have
    more files than a process may open."""

    def __init__(self, path: Path, begin: int, dtype: torch.dtype, shape: tuple[int, ...]):
        super().__init__(dtype, shape, str(path))
        self._begin = begin  # the offset in the file

    def read(self, first: int, count: int, into: int) -> None:
        width = self.dtype.itemsize
        begin, left = self._begin + first * width, bytes_at(into, count * width)
        try:
            with open(self.where, "rb", buffering=0) as file:
                while left and (done := os.preadv(file.fileno(), [left], begin)) > 0:
                    left, begin = left[done:], begin + done
        except OSError as error:
            fail_of_system(OSError(error.errno, error.strerror, self.where))
        if left:
            fail_malformed(self.where, "it has become shorter since it was opened")


def tensors_in(files: Files) -> dict[str, FileTensor]:
    """Return the tensors by name. Reads only headers."""
    found: dict[str, FileTensor] = {}
    for path in _paths(files):
        for name, (dtype, shape, file, begin) in _core.safetensors_in(str(path)).items():
            if name in found:
                refuse(
                    f'cannot read "{name}": it is in more than one file',
                    where=f"{found[name].where} and {file}",
                    needed="the files of one checkpoint",
                )
            if dtype not in DTYPES:
                refuse(
                    f"cannot read a tensor that holds {dtype}", where=f"{name} in {file}", needed=f"one of {', '.join(DTYPES)}"
                )
            found[name] = FileTensor(Path(file), begin, getattr(torch, DTYPES[dtype]), tuple(shape))
    return found


def _paths(files: Files) -> Iterator[Path]:
    """Yield the files and indexes that a file name, an index, a directory, a pattern, or several of these name."""
    if not isinstance(files, (str, os.PathLike)):
        for each in files:
            yield from _paths(each)
        return
    path = Path(files)
    if path.is_dir():
        named = [path / name for name in (SINGLE, INDEX) if (path / name).exists()]
        yield from _paths(named[0] if named else path / f"*{SUFFIX}")
        return
    paths = [path] if path.exists() else [Path(found) for found in sorted(glob(str(path)))]
    if not paths:
        refuse(f"no file matches {files}", needed='a checkpoint, or safetensors files, such as "model/*.safetensors"')
    yield from paths
