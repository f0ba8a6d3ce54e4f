"""Torch's GPU: which one, which stream, and which memory is free. No other file of the package names torch's module or device
type for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ballast.checks import refuse, refuse_order

GPU = "cuda"  # torch's type of the devices that the library works on, and the method that moves a tensor there
is_on_gpu = torch.Tensor.is_cuda.__get__
NO_GRAPHS = "disable_cuda_graphs"  # torchtitan's option


def gpu_module() -> Any:
    """Return torch's module of streams and memory of these devices."""
    return torch.get_device_module(GPU)


# --- Devices ---


def is_gpu(device: torch.device) -> bool:
    return bool(device.type == GPU)


def gpu_of_tensors(tensors: Iterable[torch.Tensor]) -> int | None:
    return next((each.device.index for each in tensors if is_gpu(each.device)), None)


def device_at(gpu: int | None) -> torch.device:
    return torch.device("cpu") if gpu is None else torch.device(GPU, gpu)


def current_device() -> torch.device:
    """Return the GPU that this process works on; the CPU if torch can use none."""
    return device_at(int(gpu_module().current_device()) if gpu_module().is_available() else None)


def default_generator(device: torch.device) -> torch.Generator:
    if not is_gpu(device):
        return torch.default_generator
    index = gpu_module().current_device() if device.index is None else device.index
    generator: torch.Generator = gpu_module().default_generators[index]
    return generator


# --- Streams ---


def stream_on(gpu: int | None) -> int:
    """Return the handle of torch's current stream, in which training begins; 0 without a GPU."""
    if gpu is None:
        return 0
    if gpu_module().current_device() != gpu:
        refuse(
            f"cannot train on {device_at(gpu)}: this process works on {device_at(gpu_module().current_device())}",
            needed="one GPU for both",
            remedy=f"torch.{GPU}.set_device({gpu}), at the beginning of the program",
        )
    return current_stream(gpu)


def current_stream(gpu: int | None) -> int:
    """Return the handle of torch's current stream; 0 without a GPU."""
    return 0 if gpu is None else int(gpu_module().current_stream(gpu).cuda_stream)


def is_capturing(gpu: int | None) -> bool:
    """Return whether work in torch's current stream becomes part of a CUDA graph."""
    return gpu is not None and bool(gpu_module().is_current_stream_capturing())


def require_stream(gpu: int | None, stream: int) -> None:
    """Refuse another current stream: Ballast orders its work on parameters and gradients with this one only."""
    if gpu is not None and (current_stream(gpu) != stream or gpu_module().current_device() != gpu):
        refuse_order(
            "cannot use the model in this CUDA stream: its training began in another CUDA stream, or on another GPU",
            needed=f"one stream for all steps and evaluations: all of them inside of `with torch.{GPU}.stream(...)`, or none",
        )


@contextmanager
def in_stream(gpu: int | None, stream: int) -> Iterator[None]:
    """Work in this stream inside the block. A training or the program may end in any stream, so the work of the current
    stream is complete when the block begins, and the work of the block is complete when it ends."""
    if current_stream(gpu) == stream:
        yield
        return
    torch_gpu = gpu_module()
    torch_gpu.synchronize(gpu)
    ours = torch_gpu.ExternalStream(stream, device=gpu) if stream else torch_gpu.default_stream(gpu)
    with torch_gpu.stream(ours):
        yield
    torch_gpu.synchronize(gpu)


def wait_for_current_streams(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for torch's current stream on each GPU that these tensors are on."""
    for device in {tensor.device for tensor in tensors if is_gpu(tensor.device)}:
        gpu_module().current_stream(device).synchronize()


# --- Memory ---


def tensor_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return the values as a tensor there. The copy to a GPU is ordered with torch's current stream, and not waited for."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device="cpu")
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def free_bytes(gpu: int) -> int:
    return int(gpu_module().mem_get_info(gpu)[0])


def name_and_bytes(gpu: int) -> tuple[str, int]:
    found = gpu_module().get_device_properties(gpu)
    return found.name, found.total_memory


def return_cached_memory(gpu: int | None) -> None:
    """Return the memory that torch caches for its next tensors to the GPU: the library needs it."""
    if gpu is not None:
        gpu_module().empty_cache()
