"""A training whose model is compiled by torch."""

from typing import Any

import ballast
import torch
from python.wrap.support.loops import Tower, mean_square
from torch._dynamo.utils import counters

CONFIGURATIONS = ("before", "after", "blocks before", "blocks after")  # what is compiled, and when relative to wrap()


def train_in_all_configurations(rank: int, options: dict[str, Any]) -> list[tuple[list[float], int]]:
    return [train(rank, options, configuration) for configuration in CONFIGURATIONS]


def train(rank: int, options: dict[str, Any] | None, configuration: str) -> tuple[list[float], int]:
    """Return the losses and the number of graphs. Without options, torch alone trains on all ranks' batches."""
    torch._dynamo.reset()
    counters.clear()
    model = Tower()
    called = compiled(model, configuration) if configuration.endswith("before") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options is not None:
        optimizer = ballast.wrap(optimizer, model, **options)
    if configuration.endswith("after"):
        called = compiled(model, configuration)
    losses = []
    for step in range(4):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        loss = mean_square(called, batch if options is None else batch[4 * rank : 4 * rank + 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(mean_square(called, batch).item())
    if options is not None:
        optimizer.close()
    return losses, counters["stats"]["unique_graphs"]


def compiled(model: Tower, configuration: str) -> torch.nn.Module:
    fullgraph = configuration.startswith("whole")
    configuration = configuration.removeprefix("whole ")
    if configuration.startswith("blocks"):
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=fullgraph)
        return model
    if configuration.startswith("layers"):  # torchtitan's recipe
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=fullgraph)
        return model
    return torch.compile(model, backend="aot_eager", fullgraph=fullgraph)


def train_in_whole_graphs(rank: int, every: list[tuple[dict[str, Any], str]]) -> list[tuple[list[float], int]]:
    return [train(rank, options, f"whole {configuration}") for options, configuration in every]
