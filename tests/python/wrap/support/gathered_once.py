"""Trainings that keep gathered parameters, for the tests of test_keep_gathered.py."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ballast import _core
from ballast.torch.parameters import gathered_memory
from python.wrap.support.loops import Loop

WIDTH = 20
BLOCKS = 6


def blocks() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


class Kept(NamedTuple):
    """What a training shows after each step, and at its end."""

    losses: list[float]
    device_bytes: list[int]
    sent: list[float]


def kept_by_itself(rank: int, hosts: int, configurations: list[dict[str, Any]], free: list[int]) -> list[Kept]:
    """Train in stage 3 in each configuration, with ranks that count as those of so many hosts. Let the machine have these free
    bytes one after the other, the last one from then on."""
    _core.machine_name = lambda: f"host {rank * hosts // dist.get_world_size()}"
    found = []
    for options in configurations:
        left = [*free]
        gathered_memory.available_memory = lambda _, left=left: left.pop(0) if len(left) > 1 else left[0]
        gathered_memory.bytes_below_peak = lambda: 0
        bytes_: list[int] = []
        sent: list[float] = []

        def look(model: Any, optimizer: Any, bytes_: list[int] = bytes_, sent: list[float] = sent) -> None:
            metrics = optimizer.metrics()
            bytes_.append(int(metrics["memory_bytes/device"]))
            sent.append(metrics["sent_bytes/across"] + metrics["sent_bytes/inside"])

        loop = Loop(rank=rank, ranks=dist.get_world_size(), make_model=blocks, steps=40, after_step=look)
        found.append(Kept(loop.run(stage=3, **options).losses, bytes_, sent))
    return found


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
