"""Tests of mixtures of experts: a rank without tokens for an expert adds zeros to its gradients, at every stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.bodies import loop_of
from python.wrap.support.ranks import run_ranks
from torch.utils.checkpoint import checkpoint

EXPERTS = 6


class Mixture(torch.nn.Module):
    """A block in which each token passes through one expert. An expert without tokens is not called, so it has no gradient."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.router = torch.nn.Linear(width, EXPERTS)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(EXPERTS)])
        self.unused = 0  # experts without tokens, in all calls

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(tokens)
        shares, chosen = torch.softmax(self.router(normed), dim=-1).max(dim=-1)
        result = tokens
        for number, expert in enumerate(self.experts):
            [those] = torch.nonzero(chosen == number, as_tuple=True)
            if len(those) > 0:
                result = result.index_add(0, those, shares[those, None] * torch.tanh(expert(normed[those])))
            else:
                self.unused += 1
        return result


class Mixtures(torch.nn.Module):
    """Blocks between two layers. The last layer's matrix is used before the blocks too, so its gradient is complete last."""

    def __init__(self, is_checkpointed: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(20, 20)
        self.blocks = torch.nn.ModuleList([Mixture(20) for _ in range(3)])
        self.is_checkpointed = is_checkpointed

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = self.first(batch)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if self.is_checkpointed else block(tokens)
        return torch.nn.functional.linear(tokens, self.first.weight)


def unused(model: torch.nn.Module) -> list[int]:
    return [block.unused for block in model.modules() if isinstance(block, Mixture)]


def trained(
    rank: int, is_checkpointed: bool, training: dict[str, Any], configurations: Sequence[dict[str, Any]]
) -> list[tuple[list[torch.Tensor], list[int]]]:
    """Train with torch's DistributedDataParallel first, then in each configuration. Return parameters, and how often each block
    had no tokens for an expert."""
    of_training = {"optimizer_options": {"lr": 0.1}, "make_optimizer": torch.optim.SGD, **training}
    loop = loop_of(rank, make_model=partial(Mixtures, is_checkpointed), **of_training)
    plain = loop.make_model()
    ddp = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True) if dist.get_world_size() > 1 else plain
    run = loop.train(ddp, loop.make_optimizer(ddp.parameters(), **loop.optimizer_options))
    results = [(run.parameters, unused(plain))]
    for options in configurations:
        run = loop.run(**options)
        with ballast.gather(run.model):
            results.append((run.parameters, unused(run.model)))
    return results


BLOCKS = {"units": ["Mixture"]}
LINEAR = {"units": ["Linear"]}  # each expert is a unit


def bits(parameters):
    return [each.tolist() for each in parameters]


def check(answers):
    """Compare with torch, and the bits of all configurations. Ranks must have lacked tokens for different experts."""
    for (expected, unused), *ours in answers:
        assert min(unused) > 0
        for parameters, also_unused in ours:
            assert also_unused == unused
            for mine, theirs in zip(parameters, expected, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
            assert bits(parameters) == bits(ours[0][0])
    counts = [answer[0][1] for answer in answers]
    assert any(len({*of_ranks}) > 1 for of_ranks in zip(*counts)), counts


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_stage_3_trains_experts_that_lack_tokens_on_some_ranks(ranks, is_checkpointed, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    configurations = [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **BLOCKS}]
    configurations += [{"stage": 3, "offload": on_drive}, {"stage": 3, "update_in_backward": True}]
    configurations += [{"stage": 3, **LINEAR}, {"stage": 3, **LINEAR, "update_in_backward": True}]
    check(run_ranks(ranks, trained, is_checkpointed, {}, configurations))


def test_gradients_are_accumulated_and_clipped_by_torch():
    configurations = [{"stage": 3}, {"stage": 3, **BLOCKS}, {"stage": 3, **LINEAR}]
    check(run_ranks(2, trained, False, {"micro_steps": 2, "clip": 0.1}, configurations))
