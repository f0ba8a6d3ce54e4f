"""A training whose model is compiled by torch."""

import ballast
import torch
from python.wrap.support.loops import Tower, mean_square
from torch._dynamo.utils import counters

WAYS = ("before", "after", "blocks before", "blocks after")  # what is compiled, and when relative to wrap()


def train_in_all_ways(rank: int, stage: int) -> list[tuple[list[float], int]]:
    return [train(rank, stage, way) for way in WAYS]


def train(rank: int, stage: int | None, way: str) -> tuple[list[float], int]:
    """Return the losses and the number of graphs. Without a stage, torch alone trains on all ranks' batches."""
    torch._dynamo.reset()
    counters.clear()
    model = Tower()
    called = compiled(model, way) if way.endswith("before") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    if way.endswith("after"):
        called = compiled(model, way)
    losses = []
    for step in range(4):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        loss = mean_square(called, batch if stage is None else batch[4 * rank : 4 * rank + 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(mean_square(called, batch).item())
    if stage is not None:
        optimizer.close()
    return losses, counters["stats"]["unique_graphs"]


def compiled(model: Tower, way: str) -> torch.nn.Module:
    if way.startswith("blocks"):
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model
    return torch.compile(model, backend="aot_eager")
