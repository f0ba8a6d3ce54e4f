"""The library's memory as torch tensors, and their formats."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from resource import RUSAGE_SELF, getrusage

import torch

from ballast import _core
from ballast.torch.gpu import device_at

DTYPES = {
    torch.float32: _core.DType.fp32,
    torch.bfloat16: _core.DType.bf16,
    torch.float16: _core.DType.fp16,
}

TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in DTYPES.items()}

BYTES = torch.uint8  # the format of a unit of opaque parameters, whose bytes are its elements


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can. Otherwise the memory that it keeps after large
    tensors adds up to the size of a model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, for the next tensors of its size.

    The gradients of a unit are freed together, and those of the next unit take their place. glibc would return that
    much memory to the kernel and get it again page by page, which costs a tenth of a step. Settings in the environment
    take precedence.
    """
    _set_malloc({"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": (1 << 31) - 1})


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the kernel does not show it."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def bytes_below_peak() -> int:
    """Return how much less memory is resident than this process has had at most."""
    return max(getrusage(RUSAGE_SELF).ru_maxrss * 1024 - resident_bytes(), 0)


def map_tensors_separately(least: int) -> None:
    """Return the memory of tensors from this size on to the system when they are freed.

    An activation that is offloaded leaves a hole in the heap next to small objects that stay. glibc cannot place a tensor of
    the same size in it, because it requests more, to align the tensor. So the heap would grow as if nothing was offloaded.
    Settings in the environment take precedence.
    """
    _set_malloc({"MALLOC_MMAP_THRESHOLD_": min(max(least, 128 << 10), 32 << 20)})


def _set_malloc(values: Mapping[str, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in ("GLIBC_TUNABLES", *_MALLOC_SETTINGS)):
        return
    for name, value in values.items():
        mallopt(_MALLOC_SETTINGS[name], value)


# The number of each setting, by its name in the environment. Blocks from 32 MiB on are always mapped separately.
_MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}


def bytes_at(address: int, count: int) -> memoryview:
    """Return a view of host memory. The caller keeps the memory alive."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory as a one-dimensional tensor of this many elements, at least one."""
    return torch.frombuffer(bytes_at(address, count * dtype.itemsize), dtype=dtype)


def tensor_of(memory: _core.Memory, dtype: torch.dtype, first: int = 0, count: int | None = None) -> torch.Tensor:
    """Return this many elements of the memory, or all, as a one-dimensional tensor with a storage of its own: libraries
    that save models take parameters of one storage for tied ones. The memory lives as long as the tensor."""
    count = memory.bytes // dtype.itemsize if count is None else count
    if count == 0:
        return torch.empty(0, dtype=dtype, device=device_at(memory.gpu))
    if dtype == BYTES:  # they are shown as pairs: each tensor begins at an even byte, and padding follows it
        pairs = torch.from_dlpack(memory.dlpack(_core.DType.bf16, first // 2, (count + 1) // 2))
        return pairs.view(BYTES)[:count]
    return torch.from_dlpack(memory.dlpack(DTYPES[dtype], first, count))
