"""Tests of a run on drives, whose units are updated in the backward pass and again where the step clips or is skipped."""

from __future__ import annotations

import math
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop
from python.wrap.support.ranks import run_ranks

CLIPPED, ACCUMULATED, SKIPPED = 5, 11, 15  # steps, so few that updates stay in the backward pass
STEPS = 18


def train(rank: int, ranks: int, folder: str, run: str | None, look: bool = False) -> tuple[list[Any], list[float]]:
    """Train with a rate of its own in each step. Return the losses and values, and the repeated steps after each step."""
    loop = Loop(rank=rank, ranks=ranks)
    model = loop.make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = ballast.wrap(optimizer, model, stage=3, offload=f"nvme:{folder}", **({"run": run} if run else {}))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen: list[Any] = []
    repeated = []
    for step in range(STEPS):
        for micro_step in range(2 if step == ACCUMULATED else 1):
            loss = loop.loss(model, loop.batch(2 * step + micro_step))
            seen.append(loss.item())
            (loss * (math.inf if step == SKIPPED else 1.0)).backward()
        if look and step == 3:
            with ballast.gather(model):
                seen.append([each.detach().clone() for each in model.parameters()])
        if step < SKIPPED:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step == CLIPPED else 1e3)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        repeated.append(optimizer.metrics()["repeated_steps"])
    with ballast.gather(model):
        seen.append([each.detach().clone() for each in model.parameters()])
    return seen, repeated


def check_same(expected: list[Any], seen: list[Any]) -> None:
    for one, other in zip(expected, seen, strict=True):
        same = one == other if isinstance(one, float) else all(map(torch.equal, one, other))
        assert same


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_clips_accumulates_and_skips_with_the_bits_of_updates_after_the_norm(tmp_path, ranks):
    after = run_ranks(ranks, train, ranks, str(tmp_path), None)
    early = run_ranks(ranks, train, ranks, str(tmp_path), "early")
    for (expected, none_repeated), (seen, repeated) in zip(after, early):
        check_same(expected, seen)
        assert none_repeated == [0.0] * STEPS
        assert [step for step in range(1, STEPS) if repeated[step] > repeated[step - 1]] == [CLIPPED, ACCUMULATED, SKIPPED]


def test_parameters_between_backward_and_step_are_those_before_the_step(tmp_path):
    [(expected, _)] = run_ranks(1, train, 1, str(tmp_path), None, True)
    [(seen, repeated)] = run_ranks(1, train, 1, str(tmp_path), "early", True)
    check_same(expected, seen)
    assert repeated[3] == 1
