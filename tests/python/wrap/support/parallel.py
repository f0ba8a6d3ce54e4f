"""The functions that ranks run in the tests of tensor parallelism and of no_sync()."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.bodies import Trained, loop_of
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Run, mean_square
from torch.distributed.device_mesh import DeviceMesh


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


def batch_of(step: int, rank: int | None) -> torch.Tensor:
    """Return the batch of one of two ranks with different data, or that of both."""
    everything = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
    return everything if rank is None else everything[8 * rank : 8 * rank + 8]


def halves_of_a_model(rank: int, stage: int, by_option: bool) -> tuple[list[float], list[float], float, float]:
    """Return each step's norms of the full model and of this half, and the largest difference of parameters at the end. Then
    take a step whose gradients are not finite on the last rank alone, and return whether it is skipped."""
    half, place = rank % 2, rank // 2
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][half]
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])][place]
    full, model = FullModel(), Half(half, parts)
    plain = torch.optim.AdamW(full.parameters(), lr=1e-2)
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        model,
        stage=stage,
        mesh=mesh_of_halves(data, parts),
        max_grad_norm=0.05 if by_option else None,
        tuning=ballast.Tuning(replicated=model.replicated),
    )
    expected, norms = [], []
    for step in range(5):
        mean_square(full, batch_of(step, None)).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(full.parameters(), 0.05)))
        plain.step()
        plain.zero_grad()
        mean_square(model, batch_of(step, place)).backward()
        norm = None if by_option else optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.metrics()["grad_norm"] if norm is None else float(norm))
    own = slice(12 * half, 12 * half + 12)
    same = [*full.norm.parameters(), full.up.weight[own], full.up.bias[own], full.down.weight[:, own], full.down.bias]
    with ballast.gather(model), torch.no_grad():
        mine = [*model.norm.parameters(), *model.up.parameters(), model.down.weight, model.bias]
        apart = max(float((one - other).abs().max()) for one, other in zip(mine, same))
    factor = float("inf") if rank == 3 else 1.0
    model.up.weight.register_hook(lambda gradient: gradient * factor)
    mean_square(model, batch_of(0, place)).backward()
    optimizer.step()
    return expected, norms, apart, optimizer.metrics()["skipped"]


def exports_halves(rank: int, folder: str, stage: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether this half's file exists when export() returns, and the values that belong in it."""
    half = rank % 2
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][half]
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = Half(half, parts)
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, mesh=mesh_of_halves(data, parts)
    )
    mean_square(model, batch_of(0, rank // 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    path = Path(folder) / f"half-{half}.safetensors"
    ballast.export(model, path)
    is_there = path.exists()
    with ballast.gather(model):
        return is_there, {name: value.clone() for name, value in model.state_dict().items()}


class Uneven(torch.nn.Module):
    """A model that uses one of its layers only in every other call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(20, 30), torch.nn.Linear(30, 5)
        self.sometimes = torch.nn.Linear(30, 5)
        self.calls = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        inner = torch.tanh(self.first(batch))
        result: torch.Tensor = self.last(inner)
        return result + self.sometimes(inner) if self.calls % 2 else result


def passes_reduced_together(rank: int, configurations: list[tuple[dict[str, Any], int, int]]) -> list[tuple[Trained, float]]:
    """Train with each triple of options, micro-batches a step, and how many of those are in no_sync()."""
    return [_reduced_together(rank, *configuration) for configuration in configurations]


def _reduced_together(rank: int, options: dict[str, Any], micro_steps: int, alone: int) -> tuple[Trained, float]:
    loop = loop_of(rank)
    model = Uneven()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
    losses = []
    for step in range(4):
        for micro in range(micro_steps):
            with optimizer.no_sync() if micro < alone else nullcontext():
                loss = mean_square(model, loop.batch(step * micro_steps + micro))
                (loss / micro_steps).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    run = Run(model, optimizer, losses)
    with ballast.gather(model):
        return (losses, run.parameters), optimizer.metrics()["bytes/reduce"]
