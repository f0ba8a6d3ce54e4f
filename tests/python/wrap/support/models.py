"""Models that several files of tests train."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 20
BLOCKS = 6


def blocks() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


class Tall(torch.nn.Module):
    """A model of linear layers. Most of its values are in blocks that are gathered one by one."""

    def __init__(self, width: int = 48, blocks: int = 4):
        super().__init__()
        self.first = torch.nn.Linear(20, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(blocks)))
        self.last = torch.nn.Linear(width, 5)
        self.apply(self.initialize)

    def initialize(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.1)
            torch.nn.init.zeros_(module.bias)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.blocks(self.norm(self.first(batch))))
        return result


class Shapes(torch.nn.Module):
    """Matrices, a stack of them, convolutions of one point, a single column and a single row, vectors, a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(20, 24)
        self.experts = torch.nn.Parameter(torch.randn(3, 24, 7) * 0.2)
        self.point = torch.nn.Conv1d(7, 5, 1)
        self.window = torch.nn.Conv1d(5, 4, 3, padding=1)
        self.column = torch.nn.Parameter(torch.randn(12, 1))
        self.row = torch.nn.Parameter(torch.randn(1, 12))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.layer(batch))
        by_expert = torch.einsum("bi,eij->bje", inner, self.experts)
        result: torch.Tensor = self.window(torch.tanh(self.point(by_expert))).flatten(1)
        return self.scale * result @ self.column @ self.row


def small_batch(number: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(7 * number + rank))


class UsedByMethod(torch.nn.Module):
    """A model that is used through a method and never called itself, as Lightning's modules are."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
        self.head = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.blocks(batch)).square().mean()
        return loss


# --- A model in two halves, for tensor parallelism ---


def mesh_of_halves(data: Any, parts: Any) -> DeviceMesh:
    """Return the mesh of four ranks: two halves of a model, each with two batches."""
    return DeviceMesh.from_group([data, parts], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("data", "tensor"))


class CopyToParts(torch.autograd.Function):
    """The identity in forward. Backward sums the gradient over all parts."""

    @staticmethod
    def forward(context: Any, batch: torch.Tensor, parts: Any) -> torch.Tensor:
        context.parts = parts
        return batch.view_as(batch)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.parts)
        return gradient, None


class SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor, parts: Any) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=parts)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class FullModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(20)
        self.up = torch.nn.Linear(20, 24)
        self.down = torch.nn.Linear(24, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(self.norm(batch))))
        return result


class Half(torch.nn.Module):
    """Half of the inner features of FullModel. The layers before and after them are replicated on both ranks."""

    def __init__(self, half: int, parts: Any):
        super().__init__()
        full, self.parts = FullModel(), parts
        own = slice(12 * half, 12 * half + 12)
        self.norm, self.up, self.down = full.norm, torch.nn.Linear(20, 12), torch.nn.Linear(12, 5, bias=False)
        self.bias = torch.nn.Parameter(full.down.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(full.up.weight[own])
            self.up.bias.copy_(full.up.bias[own])
            self.down.weight.copy_(full.down.weight[:, own])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(CopyToParts.apply(self.norm(batch), self.parts)))
        result: torch.Tensor = SumOfParts.apply(self.down(inner), self.parts) + self.bias
        return result

    @property
    def replicated(self) -> list[torch.Tensor]:
        return [*self.norm.parameters(), self.bias]


def batch_of_half(step: int, rank: int | None) -> torch.Tensor:
    """Return the batch of one of two ranks with different data, or that of both."""
    everything = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
    return everything if rank is None else everything[8 * rank : 8 * rank + 8]
