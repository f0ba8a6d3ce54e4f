"""Trainings that keep gathered parameters, for the tests of test_keep_gathered.py."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from python.wrap.support.loops import Loop

WIDTH = 20
BLOCKS = 6


def blocks() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


def sent_and_kept(rank: int, micro_steps: int, configurations: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the bytes that this rank sends in a step of stage 3, and those of its memory, in each configuration."""
    results = []
    for options in configurations:
        sent: list[float] = []
        loop = Loop(
            rank=rank,
            ranks=dist.get_world_size(),
            make_model=blocks,
            micro_steps=micro_steps,
            steps=24,
            after_step=lambda model, optimizer: sent.append(optimizer.metrics()["sent_bytes/inside"]),
        )
        memory = loop.run(stage=3, **options).optimizer.metrics()["memory_bytes/device"]
        # The first steps are on demand. A gather for the next step is counted in this one or in the next one.
        results.append((statistics.fmean(sent[4:]), memory))
    return results
