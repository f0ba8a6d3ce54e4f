"""Trainings that are offloaded and reloaded: functions that other processes can find by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ballast
import torch
from python.wrap.support.bodies import Trained, loop_of
from python.wrap.support.loops import Loop, Tower


def train_and_offload(loop: Loop, offloads: bool, **options: Any) -> Trained:
    """Train, and evaluate after each step. If `offloads` is set, also offload and reload after each step."""
    evaluated: list[float] = []

    def after_step(model: torch.nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            evaluated.append(loop.loss(model, loop.batch(100)).item())
        if offloads:
            optimizer.offload()
            optimizer.reload()

    run = replace(loop, after_step=after_step).run(**options)
    with ballast.gather(run.model):
        return run.losses + evaluated, run.parameters


def with_and_without_offload(rank: int, configurations: list[dict[str, Any]]) -> list[tuple[Trained, Trained]]:
    loop = loop_of(rank, make_model=Tower, steps=3)
    return [(train_and_offload(loop, False, **options), train_and_offload(loop, True, **options)) for options in configurations]


def one_rank_is_in_the_middle_of_a_step(rank: int) -> str:
    run = loop_of(rank, steps=1).run(stage=2)
    if rank == 1:
        run.model(torch.ones(20)).sum().backward()
    try:
        run.optimizer.offload()
    except ballast.UsageError as error:
        return str(error)
    return "offloaded"
