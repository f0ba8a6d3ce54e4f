"""Models whose views of parameters are used after other modules have been called."""

from __future__ import annotations

import ballast
import torch
from torch import nn


def blocks() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])


class Queries(nn.Module):
    """Takes a view of a submodule's parameter, as decoders of DETR do with their queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.blocks = nn.Embedding(6, 8), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.weight.expand(len(x), -1, -1)
        for block in self.blocks:
            x = torch.relu(block(x))
        return torch.einsum("bqd,bd->bq", queries, x)


class ClassToken(nn.Module):
    """Takes views of its own parameters before its blocks, and uses them afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale, self.blocks = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.ones(2, 8)), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token, scale = self.token.expand(len(x), -1), self.scale[1]
        for block in self.blocks:
            x = torch.relu(block(x))
        return (x + token) * scale


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8))

    def forward(self, count: int) -> tuple[torch.Tensor, int]:
        return self.weight.expand(count, -1), count


class Positions(nn.Module):
    """Has a submodule that returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.blocks = Position(), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position, _ = self.position(len(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return x + position


MODELS = {kind.__name__: kind for kind in (Queries, ClassToken, Positions)}


def losses(rank: int, name: str, stage: int | None) -> list[float]:
    """Train on the same batches on all ranks; without a stage in plain torch."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    found = []
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            found.append(model(batch).square().mean().item())
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
