"""Memory of the library as torch sees it."""

from __future__ import annotations

import torch

from ballast import _core


class _OnGpu:
    """Bytes on a GPU, in the form that torch takes them in. Holds what they belong to."""

    def __init__(self, memory: _core.Memory):
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 2,
        }


def tensor_of(memory: _core.Memory, dtype: torch.dtype) -> torch.Tensor:
    """All of it, one-dimensional. The memory lives as long as the tensor."""
    if memory.bytes == 0:
        return torch.empty(0, dtype=dtype)
    if memory.gpu is None:
        return torch.frombuffer(memory, dtype=dtype)
    return torch.as_tensor(_OnGpu(memory), device=f"cuda:{memory.gpu}").view(dtype)
