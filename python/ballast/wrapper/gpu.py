"""Agreements between Ballast and torch on a GPU: which GPU, which stream, and which memory is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ballast.checks import refuse, refuse_order


def stream_on(gpu: int | None) -> int:
    """Return the handle of torch's current stream, in which training begins; 0 without a GPU."""
    if gpu is None:
        return 0
    if torch.cuda.current_device() != gpu:
        refuse(
            f"cannot train on cuda:{gpu}: this process works on cuda:{torch.cuda.current_device()}",
            needed="one GPU for both",
            remedy=f"torch.cuda.set_device({gpu}), at the beginning of the program",
        )
    return current_stream(gpu)


def current_stream(gpu: int | None) -> int:
    """Return the handle of torch's current stream; 0 without a GPU."""
    return 0 if gpu is None else int(torch.cuda.current_stream(gpu).cuda_stream)


def require_stream(gpu: int | None, stream: int) -> None:
    """Refuse another current stream: Ballast orders its work on parameters and gradients with this one only."""
    if current_stream(gpu) != stream:
        refuse_order(
            "cannot use the model in this CUDA stream: its training began in another CUDA stream",
            needed="one stream for all steps and evaluations: all of them inside of `with torch.cuda.stream(...)`, or none",
        )


@contextmanager
def in_stream(gpu: int | None, stream: int) -> Iterator[None]:
    """Work in this stream inside the block. A training or the program may end in any stream, so the work of the current
    stream is complete when the block begins, and the work of the block is complete when it ends."""
    if current_stream(gpu) == stream:
        yield
        return
    torch.cuda.synchronize(gpu)
    ours = torch.cuda.ExternalStream(stream, device=gpu) if stream else torch.cuda.default_stream(gpu)
    with torch.cuda.stream(ours):
        yield
    torch.cuda.synchronize(gpu)


def tensor_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return the values as a tensor there. The copy to a GPU is ordered with torch's current stream, and not waited for."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def return_cached_memory(gpu: int | None) -> None:
    """Return the memory that torch caches for its next tensors to the GPU: the library needs it."""
    if gpu is not None:
        torch.cuda.empty_cache()
