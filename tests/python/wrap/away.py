"""Trainings that leave their device now and then: functions that other processes can find by name."""

from __future__ import annotations

from typing import Any

import torch
from python.wrap.loops import Loop, Tower
from python.wrap.bodies import Trained, loop_of

import ballast


def train_and_leave(loop: Loop, leaves: bool, **options: Any) -> Trained:
    model = loop.make_model()
    optimizer = ballast.wrap(loop.make_optimizer(model.parameters(), **loop.optimizer_options), model, **options)
    losses = []
    for step in range(loop.steps):
        loss = loop.loss(model, loop.batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loop.loss(model, loop.batch(100)).item())
        if leaves:
            optimizer.offload()
            optimizer.reload()
    with ballast.gather(model):
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def leaves_and_stays(rank: int, ways: list[dict[str, Any]]) -> list[tuple[Trained, Trained]]:
    loop = loop_of(rank, make_model=Tower, steps=3)
    return [(train_and_leave(loop, False, **options), train_and_leave(loop, True, **options)) for options in ways]


def one_rank_is_in_the_middle_of_a_step(rank: int) -> str:
    run = loop_of(rank, steps=1).run(stage=2)
    if rank == 1:
        run.model(torch.ones(20)).sum().backward()
    try:
        run.optimizer.offload()
    except ballast.UsageError as error:
        return str(error)
    return "offloaded"
