"""What Ballast and torch must agree about on a GPU: which one, in which stream, and whose memory is free."""

from __future__ import annotations

import torch

from ballast.checks import refuse, refuse_order


def stream_on(gpu: int | None) -> int:
    """Torch's current one, as CUDA names it: training begins in it."""
    if gpu is None:
        return 0
    if torch.cuda.current_device() != gpu:
        refuse(
            f"the model is on cuda:{gpu}, and cuda:{torch.cuda.current_device()} is what this process works on",
            needed="one GPU for both",
            remedy=f"torch.cuda.set_device({gpu}), at the program's beginning",
        )
    return int(torch.cuda.current_stream(gpu).cuda_stream)


def require_stream(gpu: int | None, stream: int) -> None:
    """What is done to parameters and gradients is ordered with work in this stream of torch's, and in no other."""
    if gpu is not None and torch.cuda.current_stream(gpu).cuda_stream != stream:
        refuse_order(
            "a model was used in another CUDA stream than the one that its training began in",
            needed="one stream for all steps: all of them inside of `with torch.cuda.stream(...)`, or none",
        )


def return_cached_memory(gpu: int | None) -> None:
    """To the GPU, where the library's memory is going to be: what torch keeps for its next tensors is not free for others."""
    if gpu is not None:
        torch.cuda.empty_cache()
