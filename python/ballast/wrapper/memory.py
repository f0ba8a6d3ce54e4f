"""Memory of the library as torch sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ballast import _core
from ballast.wrapper.units import Member, UnitOfMembers


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


def views_in(
    memory: _core.Memory, unit: UnitOfMembers, begins: list[int], members: Sequence[Member]
) -> list[torch.Tensor]:
    """Of these members of the unit, in memory that is laid out like it."""
    whole = tensor_of(memory, unit.dtype)
    return [
        whole[begins[member.tensor] :][: member.parameter.numel()].view(member.parameter.shape) for member in members
    ]
