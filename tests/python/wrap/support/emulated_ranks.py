"""What ranks run on emulated GPUs, each in a process of its own on a GPU of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from python import emulated_gpu


def train_on_gpu(
    rank: int, package: Path, configurations: list[dict[str, Any]]
) -> list[tuple[list[float], list[torch.Tensor]]]:
    """Return the losses and the final parameters of a tower in each configuration."""
    emulated_gpu.install(package)
    emulated_gpu.allow_context_only_on(rank)
    emulated_gpu.set_device(rank)

    import ballast  # the first import after torch has the GPUs
    from python.wrap.support.loops import Loop, Tower

    trained = []
    for options in configurations:
        loop = Loop(make_model=Tower, micro_steps=2, clip=0.5, device=emulated_gpu.NAME, rank=rank, ranks=2)
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append((run.losses, [parameter.cpu() for parameter in run.parameters]))
        run.optimizer.close()
    return trained
