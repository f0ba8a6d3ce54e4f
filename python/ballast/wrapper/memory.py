"""Memory of the library as torch sees it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch

from ballast import _core
from ballast.wrapper.units import DTYPES, Member, UnitOfMembers


def return_freed_memory() -> None:
    """To the system, where the C library can: what it keeps of large tensors that are gone adds up to a model else."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """In the process, for the next tensors of its size. A unit's gradients are freed together, and the next unit's take their
    place. glibc gives that much back to the kernel, and gets it again page by page (a tenth of a step), until blocks of half
    the size happen to come and go. What is set in the environment stays."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in ("GLIBC_TUNABLES", *_MALLOC_SETTINGS)):
        return
    for number, value in _MALLOC_SETTINGS.values():
        mallopt(number, value)


# By the name in the environment: number and value. More than this is a mapping of its own in any case.
_MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, (1 << 31) - 1)}


def bytes_at(address: int, count: int) -> memoryview:
    """Of host memory, which the caller knows to live long enough."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The same, one-dimensional, of so many elements: not none."""
    return torch.frombuffer(bytes_at(address, count * dtype.itemsize), dtype=dtype)


def tensor_of(memory: _core.Memory, dtype: torch.dtype, first: int = 0, count: int | None = None) -> torch.Tensor:
    """So many elements of it, or all, one-dimensional, in a storage of their own: what saves models takes parameters of one
    storage for tied ones. The memory lives as long as the tensor."""
    count = memory.bytes // dtype.itemsize if count is None else count
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu" if memory.gpu is None else f"cuda:{memory.gpu}")
    return torch.from_dlpack(memory.dlpack(DTYPES[dtype], first, count))


def views_in(
    memory: _core.Memory, unit: UnitOfMembers, begins: list[int], members: Sequence[Member]
) -> list[torch.Tensor]:
    """Of these members of the unit, in memory that is laid out like it."""
    return [
        tensor_of(memory, unit.dtype, begins[member.tensor], member.parameter.numel()).view(member.parameter.shape)
        for member in members
    ]
