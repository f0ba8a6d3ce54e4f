"""A tensor in files, whatever their format is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from ballast.wrapper.memory import tensor_at


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
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(0, values.numel(), values.data_ptr())
        return values


class CastTensor(StoredTensor):
    """A stored tensor whose values are rounded to another format when they are read."""

    def __init__(self, stored: StoredTensor, dtype: torch.dtype):
        super().__init__(dtype, stored.shape, stored.where)
        self._stored = stored

    def read(self, first: int, count: int, into: int) -> None:
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(self._stored.read_part(first, count))
