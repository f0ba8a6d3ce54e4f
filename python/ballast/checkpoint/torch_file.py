"""Read files of torch.save() without running code, and each tensor in them piece by piece, when it is used.

torch.load(mmap=True) would do the same, but pages of a mapped file stay in memory. So the file is mapped only to find the place
of each tensor in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ballast._torch_compat import tree_map
from ballast.checkpoint.unpickling import fail_unreadable, load_without_code, require_plain
from ballast.torch.memory import bytes_at, tensor_at
from ballast.torch.parameters.stored_tensors import OpenFile, StoredTensor

ANY = ("",)  # the script's own objects are in these files too, and are passed over
MOST_LEVELS = 16  # of dictionaries in each other
MOST_ENTRIES = 1 << 24  # a dictionary that is in several others counts in each of them
MAPS = Path("/proc/self/maps")


class FileTensor(StoredTensor):
    """A tensor whose elements are one after the other in a file. The file is open only while it is read: a checkpoint may have
    more files than a process may open."""

    def __init__(self, path: Path, begin: int, dtype: torch.dtype, shape: tuple[int, ...]):
        super().__init__(dtype, shape, str(path))
        self._path, self._begin = path, begin

    def read(self, first: int, count: int, into: int) -> None:
        width = self.dtype.itemsize
        if count > 0:
            OpenFile(self._path).read(self._begin + first * width, bytes_at(into, count * width))


class HeldTensor(StoredTensor):
    """A tensor that is in memory already."""

    def __init__(self, values: torch.Tensor, where: Path):
        super().__init__(values.dtype, tuple(values.shape), str(where))
        self._values = values.reshape(-1)

    def read(self, first: int, count: int, into: int) -> None:
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(self._values[first : first + count])


def contents_of(path: Path, kept: Mapping[str, type] | None = None) -> Any:
    """Return the content of a file, with a StoredTensor in place of each tensor. Objects of other classes than `kept`, by
    name, become StandIns."""
    found = load_without_code(path, path, ANY, kept)
    return _Mapped(path).replaced(found, MOST_LEVELS)


def read_tensors(found: Any) -> Any:
    """Return the content of a file with its tensors read."""
    return tree_map(lambda each: each.read_all() if isinstance(each, StoredTensor) else each, found)


class _Mapped:
    """Finds where in a file a tensor is that torch has mapped."""

    def __init__(self, path: Path):
        self._path = path
        self._parts = _mapped_parts(os.path.realpath(path))
        self._entries = 0

    def replaced(self, found: Any, levels: int) -> Any:
        """Return containers with a StoredTensor in place of each tensor."""
        self._entries += 1
        if isinstance(found, torch.Tensor):
            return self._stored(found)
        if isinstance(found, torch.Size) or not isinstance(found, (dict, list, tuple)):
            return found
        if levels == 0 or self._entries + len(found) > MOST_ENTRIES:
            fail_unreadable(self._path, f"it has more than {MOST_LEVELS} levels, or {MOST_ENTRIES:,} entries")
        if isinstance(found, dict):
            return {key: self.replaced(each, levels - 1) for key, each in found.items()}
        return [self.replaced(each, levels - 1) for each in found]

    def _stored(self, found: torch.Tensor) -> StoredTensor | None:
        """Return the tensor in the file; None for one of another layout, which no checkpoint of a training needs."""
        if found.layout is not torch.strided or found.is_quantized or found.device.type != "cpu":
            return None
        values = require_plain(found, self._path)
        begin, end = values.data_ptr(), values.data_ptr() + values.nbytes
        for first, last, offset in self._parts:
            if first <= begin and end <= last and values.is_contiguous():
                return FileTensor(self._path, offset + begin - first, values.dtype, tuple(values.shape))
        return HeldTensor(values.clone(), self._path)


def _mapped_parts(path: str) -> list[tuple[int, int, int]]:
    """Return where this process has mapped a file: the first address, the end, and the offset in the file."""
    found = []
    for line in MAPS.read_text(errors="surrogateescape").splitlines():
        addresses, _, offset, _, _, *where = line.split(maxsplit=5)
        if where == [path]:
            first, _, last = addresses.partition("-")
            found.append((int(first, 16), int(last, 16), int(offset, 16)))
    return found
