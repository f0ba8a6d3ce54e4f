"""The tensors of torch that a checkpoint is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ballast import _core
from ballast.checkpoint.contents import PARAMETER_DTYPES, Tensor
from ballast.checkpoint.pieces import Cut


class Target(Protocol):
    """A tensor to fill: begin(), take() for each cut in order, finish()."""

    name: str
    entry: Tensor
    first: int  # element of the checkpoint's tensor
    count: int

    def begin(self) -> None: ...
    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None: ...
    def finish(self) -> None: ...


class PlainTensor:
    """Takes elements as they are, of a buffer, a frozen parameter or its moments: all of them, or a shard."""

    def __init__(self, name: str, entry: Tensor, tensor: torch.Tensor, first: int = 0):
        self.name, self.entry = name, entry
        self.first, self.count = first, tensor.numel()
        self._tensor = tensor
        self._dtype = getattr(torch, entry.dtype)

    def begin(self) -> None:
        self._flat = torch.empty(self.count, dtype=self._dtype, device="cpu")

    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None:
        values = torch.frombuffer(reader.memory(), dtype=self._dtype)[cut.first : cut.first + cut.count]
        self._flat[cut.into : cut.into + cut.count] = values

    def finish(self) -> None:
        self._tensor.copy_(self._flat.view(self._tensor.shape))
        del self._flat


class TrainedTensor:
    """Takes a parameter that was trained, and is frozen now, with its moments. `parameter` is None where it is sharded:
    then its values go to the shards."""

    def __init__(self, name: str, entry: Tensor, parameter: torch.Tensor | None, moments: Mapping[str, torch.Tensor]):
        self.name, self.entry = name, entry
        self.first, self.count = 0, entry.elements
        self._parameter = parameter
        self._moments = moments

    def begin(self) -> None:
        dtype = torch.float32 if self._parameter is None else self._parameter.dtype
        self._values = torch.empty(self.entry.shape, dtype=dtype, device="cpu")
        at = {kind: moment.data_ptr() for kind, moment in self._moments.items()}
        self._part = _core.StatePart(
            dtype=PARAMETER_DTYPES[str(dtype).removeprefix("torch.")],
            parameter=self._values.data_ptr(),
            momentum=at.get("momentum", 0),
            variance=at.get("variance", 0),
            count=self.entry.elements,
        )

    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None:
        reader.copy(self.entry.kind(), (cut.piece.count, cut.first, cut.into, cut.count), self._part)

    def finish(self) -> None:
        if self._parameter is not None:
            self._parameter.copy_(self._values)
        del self._values, self._part
