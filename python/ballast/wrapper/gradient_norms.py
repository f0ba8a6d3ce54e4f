"""Norms of gradients and factors of gradients, on their way between torch's tensors and numbers. Each read of a tensor on a
GPU waits for the GPU, and so does each tensor that is made of numbers there: all gradients share one of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ballast.wrapper.gpu import tensor_on

Kind = tuple[torch.device, torch.dtype, float]  # the last one is the order


class NormTensors:
    """The norms of all gradients as tensors. One copy brings all of them to the device, where torch then asks for them one
    by one. Each tensor is handed out once, because the caller may write to it."""

    def __init__(self) -> None:
        self._ready: dict[Kind, dict[int, torch.Tensor]] = {}

    def take(self, member: int, kind: Kind, norms_of_all: Callable[[], list[float]]) -> torch.Tensor:
        ready = self._ready.setdefault(kind, {})
        if member not in ready:
            device, dtype, _ = kind
            ready.update(enumerate(tensor_on(device, norms_of_all(), dtype).unbind()))
        return ready.pop(member)

    def forget(self, member: int) -> None:
        """Forget the norm of a gradient that is scaled."""
        for ready in self._ready.values():
            ready.pop(member, None)


class FactorReader:
    """Reads a factor once, also if torch multiplies one gradient after the other by the same tensor."""

    def __init__(self) -> None:
        self._last: weakref.ref[torch.Tensor] | None = None
        self._version = 0  # of the last tensor, when it was read
        self._value = 1.0

    def read(self, factor: float | torch.Tensor) -> float:
        if not isinstance(factor, torch.Tensor) or factor.is_inference():  # torch counts no writes to such a tensor
            return float(factor)
        is_known = self._last is not None and self._last() is factor
        if not is_known or self._version != factor._version:
            self._last, self._version, self._value = weakref.ref(factor), factor._version, float(factor)
        return self._value
