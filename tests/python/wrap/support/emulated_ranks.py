"""What ranks run on emulated GPUs, each in a process of its own on a GPU of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from python import emulated_gpu

Trained = tuple[list[float], list[torch.Tensor]]


def use_gpu(rank: int, package: Path) -> None:
    """Give this rank its GPU. The first import of ballast that follows finds it."""
    emulated_gpu.install(package)
    emulated_gpu.allow_context_only_on(rank)
    emulated_gpu.set_device(rank)


def train_on_gpu(
    rank: int, package: Path, configurations: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[tuple[Trained, Trained]]:
    """Return the losses and the final parameters in each configuration, on the GPU and on the CPU. A configuration changes the
    loop, and has the options of wrap()."""
    use_gpu(rank, package)
    import ballast
    from python.wrap.support.bodies import offloading_everything
    from python.wrap.support.loops import Loop, mlp

    def trained(device: str, changes: dict[str, Any], options: dict[str, Any]) -> Trained:
        loop = Loop(**{"make_model": mlp, "micro_steps": 2, "clip": 0.5, **changes}, device=device, rank=rank, ranks=2)
        on_host = {name: value for name, value in options.items() if name != "activations"}  # they are there already
        with offloading_everything():
            run = loop.run(**(on_host if device == "cpu" else options))
        with ballast.gather(run.model):
            parameters = [parameter.cpu() for parameter in run.parameters]
        run.optimizer.close()
        return run.losses, parameters

    return [(trained(emulated_gpu.NAME, *each), trained("cpu", *each)) for each in configurations]


def train_several_on_gpu(rank: int, package: Path, stages: list[int]) -> list[tuple[Trained, Trained]]:
    """Return the losses and the final parameters with Muon and AdamW at each stage, on the GPU and on the CPU."""
    use_gpu(rank, package)
    from python.wrap.support.loops import Loop
    from python.wrap.support.several import MUON_OPTIONS, Several, muon_of

    def trained(device: str, stage: int) -> Trained:
        loop = Loop(device=device, rank=rank, ranks=2)
        return Several(muon_of(MUON_OPTIONS["like AdamW"]), micro_steps=2, steps=3, loop=loop).run(stage=stage)

    return [(trained(emulated_gpu.NAME, stage), trained("cpu", stage)) for stage in stages]
