"""What Ballast and torch must agree about on a GPU: which one, in which stream, and whose memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ballast.checks import refuse, refuse_order


def stream_on(gpu: int | None) -> int:
    """Torch's current one, as CUDA names it: training begins in it."""
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
    """Return torch's current stream, as CUDA names it; 0 without a GPU."""
    return 0 if gpu is None else int(torch.cuda.current_stream(gpu).cuda_stream)


def require_stream(gpu: int | None, stream: int) -> None:
    """What is done to parameters and gradients is ordered with work in this stream of torch's, and in no other."""
    if current_stream(gpu) != stream:
        refuse_order(
            "cannot use the model in this CUDA stream: its training began in another CUDA stream",
            needed="one stream for all steps and evaluations: all of them inside of `with torch.cuda.stream(...)`, or none",
        )


@contextmanager
def in_stream(gpu: int | None, stream: int) -> Iterator[None]:
    """Work in this stream, whichever is the current one: the end of a training, or of the program, comes in any. What was
    done in the current one is done by then, and so is what is done here when it ends."""
    if current_stream(gpu) == stream:
        yield
        return
    torch.cuda.synchronize(gpu)
    ours = torch.cuda.ExternalStream(stream, device=gpu) if stream else torch.cuda.default_stream(gpu)
    with torch.cuda.stream(ours):
        yield
    torch.cuda.synchronize(gpu)


def return_cached_memory(gpu: int | None) -> None:
    """To the GPU, where the library's memory is going to be: what torch keeps for its next tensors is not free for others."""
    if gpu is not None:
        torch.cuda.empty_cache()
