"""Trainings of a model whose matrices have Muon and whose vectors have AdamW."""

from __future__ import annotations

from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.loops import Loop
from python.wrap.support.several import Make, Several

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.02},
    "like AdamW": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "momentum": 0.2},
    "original": {"lr": 0.02, "adjust_lr_fn": "original", "nesterov": False, "ns_steps": 4, "eps": 1e-6},
}


def muon_of(options: dict[str, Any]) -> Make:
    """Return the function that makes the two optimizers."""

    def make(matrices: Any, vectors: Any) -> list[Any]:
        return [torch.optim.Muon(matrices, **options), torch.optim.AdamW(vectors, lr=1e-2)]

    return make


def training_of_ranks(rank: int, **changes: Any) -> Several:
    return Several(muon_of(OPTIONS["defaults"]), loop=Loop(rank=rank, ranks=dist.get_world_size()), **changes)


def in_every_configuration(rank: int, folder: str) -> list[tuple[list[float], torch.Tensor]]:
    """Return the losses of each configuration, and all parameters at the end."""
    training = training_of_ranks(rank, micro_steps=2, clip=0.5)
    results = []
    for options in [
        {"stage": 0},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload": "host"},
        {"stage": 3, "offload": f"nvme:{folder}"},
    ]:
        losses, values = training.run(**options)
        results.append((losses, torch.cat([value.flatten() for value in values])))
    return results


def saved_and_resumed(rank: int, folder: str) -> bool:
    """Return whether a checkpoint of stage 3 continues with the same bits in stage 2."""
    training = training_of_ranks(rank)
    model, optimizers = training.begin(stage=3)
    training.train(model, optimizers, 0, 2)
    ballast.save(f"{folder}/saved", model, optimizers)
    expected = training.train(model, optimizers, 2, 2)
    again, resumed = training.begin(stage=2)
    ballast.load_checkpoint(f"{folder}/saved", again, resumed)
    return training.train(again, resumed, 2, 2) == expected
