"""A tensor in files, whatever their format is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch


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

    def read_all(self) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(0, values.numel(), values.data_ptr())
        return values
