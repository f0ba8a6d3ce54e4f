"""What checkpoints of other programs have in common: tensors of a model, and what an optimizer keeps of each, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ballast.checkpoint.unpickling import fail_unreadable
from ballast.checks import refuse
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.updates.updates import UNCOUNTED

STEP = "step"  # in the state of a parameter, next to its moments


class Source(Protocol):
    """Finds the tensors of a checkpoint. Their values are read later, piece by piece."""

    may_be_flat: bool  # a tensor may be stored flat, whatever its shape
    trained_only: bool  # frozen parameters and buffers are not in it
    of_training: bool  # its weights may be cast to a model's formats, because they are the masters of a training

    def names(self) -> list[str]:
        """Return the names of the model's tensors."""

    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        """Return a tensor of the model, or a moment of one; None if the checkpoint lacks it."""

    def state(self, name: str) -> Collection[str]:
        """Return what the optimizer keeps of a parameter: the moments and STEP, as far as they are there."""

    def steps(self, name: str) -> int | None:
        """Return the number of steps that made the moments of a parameter."""

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the options of the parameter group that has a parameter; nothing if the checkpoint does not say them."""

    def extra(self) -> Any:
        """Return the entry `extra` of the checkpoint, or None."""


def steps_made(source: Source, name: str, needed: bool) -> int:
    """Return the number of steps that made the moments of a parameter; 1 for momentum that torch does not count. It is needed
    with second moments: without it, bias correction would take them for those of the first step."""
    found = source.steps(name)
    if found is None and needed:
        refuse(
            "the checkpoint holds moments, but not the number of steps that made them",
            where=name,
            needed="both: the next step corrects the moments by that number",
            remedy="DeepSpeed's ds_to_universal writes it to zero/optimizer_state.pt, torch next to the moments.",
        )
    if found is None and UNCOUNTED in source.state(name):
        return 1
    return found or 0


class Latest:
    """Keeps what was read last, because the pieces of a tensor are read one after the other."""

    def __init__(self) -> None:
        self._key: object = None
        self._values = torch.empty(0, device="cpu")

    def get(self, key: object, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._key != key:
            self._key, self._values = None, torch.empty(0, device="cpu")  # free the last one before the next is read
            self._values = read()
            self._key = key
        return self._values


class WholeTensor(StoredTensor):
    """A tensor that its file gives only as a whole. `latest` is shared by the tensors of which one is read at a time."""

    def __init__(
        self, read: Callable[[], torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...], where: Path, latest: Latest
    ):
        super().__init__(dtype, shape, str(where))
        self._read, self._latest = read, latest

    def read(self, first: int, count: int, into: int) -> None:
        values = self._latest.get(self, self._flat)
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(values[first : first + count])

    def _flat(self) -> torch.Tensor:
        values = self._read().reshape(-1)
        if values.numel() != self.elements or values.dtype != self.dtype:
            fail_unreadable(Path(self.where), f"it has {values.numel()} elements of {values.dtype}, and not {self.shape}")
        return values
