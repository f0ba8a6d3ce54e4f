"""GPUs of torch without a card: the device type `emulated`, whose memory, streams and kernels are those of tests/emulated_cuda.
This module is `torch.emulated`, with the part of torch.cuda's names that Ballast and its tests use."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from python.emulated_cases import LIBRARY

NAME = "emulated"
PRIVATE_USE_1 = 20  # torch's number of the device type
ON_CUDA, ON_EXTENSION = 2, 12  # DLPack's numbers of device types
calls: Any = None  # the functions of LIBRARY


@cache  # pytest imports conftest.py under two names
def install(package: Path, gpus: int = 4, memory_bytes: int = 8 << 30) -> None:
    """Give torch the GPUs, and let Ballast's package, which has been built for them, call them torch's. Only the GPU that is
    current now may be used by this process, until allow_context_only_on() names another one."""
    global calls
    calls = ctypes.CDLL(str(package / LIBRARY))
    for name in ("free_bytes", "total_bytes", "count"):
        getattr(calls, f"emulated_{name}").restype = ctypes.c_size_t
    calls.emulated_take.restype = ctypes.c_void_p
    calls.emulated_set_machine(gpus, ctypes.c_size_t(memory_bytes))
    allow_context_only_on(0)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.from_dlpack = from_dlpack

    from ballast.torch import gpu  # the first module that imports it: the others copy its names

    gpu.GPU = NAME
    gpu.is_on_gpu = torch.Tensor.is_emulated.__get__


# --- Memory of Ballast, which names CUDA ---


class DlpackTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32)]


pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def from_dlpack(capsule: object, of_torch: Any = torch.from_dlpack) -> torch.Tensor:
    """Take memory of CUDA for that of the emulated GPUs."""
    shown = DlpackTensor.from_address(pointer_in(capsule, b"dltensor"))
    if shown.device_type == ON_CUDA:
        shown.device_type = ON_EXTENSION
    return of_torch(capsule)


# --- Devices ---


def is_available() -> bool:
    return True


def device_count() -> int:
    return int(torch._C._accelerator_hooks_device_count())


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(gpu: int | torch.device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(gpu))


def allow_context_only_on(gpu: int) -> None:
    calls.emulated_allow_context_only_on(gpu)


def get_device_properties(gpu: int) -> SimpleNamespace:
    return SimpleNamespace(name="emulated GPU", total_memory=calls.emulated_total_bytes(_index(gpu)))


@contextmanager
def device(gpu: int | torch.device) -> Iterator[None]:
    before = current_device()
    set_device(gpu)
    try:
        yield
    finally:
        set_device(before)


def _index(gpu: int | torch.device | None) -> int:
    index = gpu.index if isinstance(gpu, torch.device) else gpu
    return current_device() if index is None else index


# --- Streams ---


class Stream(torch.Stream):
    def __new__(cls, handle: int | None = None, gpu: int | torch.device | None = None) -> Stream:
        if handle is None:
            handle = torch.Stream(torch.device(NAME, _index(gpu))).stream_id
        return super().__new__(cls, stream_id=handle, device_index=_index(gpu), device_type=PRIVATE_USE_1)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


def ExternalStream(handle: int, device: int | torch.device | None = None) -> Stream:
    return Stream(handle, device)


def default_stream(gpu: int | torch.device | None = None) -> Stream:
    return Stream(0, gpu)


def current_stream(gpu: int | torch.device | None = None) -> Stream:
    return Stream(torch._C._accelerator_getStream(_index(gpu)).stream_id, gpu)


@contextmanager
def stream(chosen: torch.Stream) -> Iterator[None]:
    before = current_stream(chosen.device)
    torch._C._accelerator_setStream(chosen)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


def is_current_stream_capturing() -> bool:
    return False


def synchronize(gpu: int | torch.device | None = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(gpu))


def _sleep(cycles: int) -> None:
    """Keep the current stream busy for this many cycles of a GPU with 1 GHz."""
    calls.emulated_sleep(cycles // 1_000_000)


# --- Memory ---


@contextmanager
def taken(count: int) -> Iterator[None]:
    """Take this much memory of the current GPU inside the block."""
    memory = calls.emulated_take(ctypes.c_size_t(count))
    assert memory is not None
    try:
        yield
    finally:
        calls.emulated_give_back(ctypes.c_void_p(memory))


def mem_get_info(gpu: int | torch.device | None = None) -> tuple[int, int]:
    return calls.emulated_free_bytes(_index(gpu)), calls.emulated_total_bytes(_index(gpu))


def empty_cache() -> None:
    calls.emulated_empty_cache()


# --- Random numbers ---


class Generators:
    def __getitem__(self, gpu: int) -> torch.Generator:
        return torch.ops.emulated.default_generator(gpu)


default_generators = Generators()


def manual_seed_all(seed: int) -> None:
    for gpu in range(device_count()):
        default_generators[gpu].manual_seed(seed)


def get_rng_state(gpu: int | torch.device | None = None) -> torch.Tensor:
    return default_generators[_index(gpu)].get_state()


def set_rng_state(state: torch.Tensor, gpu: int | torch.device | None = None) -> None:
    default_generators[_index(gpu)].set_state(state)


def _is_in_bad_fork() -> bool:
    return False


# --- The rest ---


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def count(call: str) -> int:
    """Return how often this thread called CUDA's function of this name since reset_counts()."""
    return int(calls.emulated_count(call.encode()))


def reset_counts() -> None:
    calls.emulated_reset_counts()
