"""Tests of tensor parallelism, and of schedules that reduce gradients in the last pass only."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.bodies import Trained, loop_of
from python.wrap.support.loops import Run, keywords, mean_square
from python.wrap.support.models import FullModel, Half, batch_of_half, mesh_of_halves
from python.wrap.support.ranks import run_ranks


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
        mean_square(full, batch_of_half(step, None)).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(full.parameters(), 0.05)))
        plain.step()
        plain.zero_grad()
        mean_square(model, batch_of_half(step, place)).backward()
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
    mean_square(model, batch_of_half(0, place)).backward()
    optimizer.step()
    return expected, norms, apart, optimizer.metrics()["skipped"]


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


@pytest.mark.parametrize(("stage", "by_option"), [(2, True), (3, False)])
def test_two_halves_of_a_model_train_as_the_whole_with_one_norm(stage, by_option):
    for expected, norms, apart, skipped in run_ranks(4, halves_of_a_model, stage, by_option):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert apart < 1e-6
        assert skipped == 1.0


def test_passes_without_a_reduction_are_reduced_with_the_last_one():
    each, last, none, one = ({}, 4, 0), ({"stage": 0}, 4, 3), ({"stage": 2}, 4, 4), ({}, 1, 0)
    configurations = [each, last, none, ({"stage": 2, "offload": "host"}, 4, 3), one]
    for trained in run_ranks(2, passes_reduced_together, configurations):
        (losses, parameters), bytes_each = trained[0]
        first, others = trained[1], trained[2:-1]
        _, bytes_of_one = trained[-1]
        assert bytes_each >= 4 * bytes_of_one
        assert first[0][0] == pytest.approx(losses, rel=1e-5)
        for mine, theirs in zip(first[0][1], parameters):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        for (other_losses, other), bytes_reduced in others:
            assert bytes_reduced <= bytes_of_one
            assert other_losses == first[0][0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first[0][1]))
