"""Tests of ranks that hold parts of one sequence: gradients are those of the whole one."""

from __future__ import annotations

from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

WORDS, WIDTH, TOKENS, STEPS = 20, 8, 12, 4


class Attends(torch.nn.Module):
    """A model with one attention. With a mesh its ranks hold parts of the sequence, and exchange keys and values."""

    def __init__(self, mesh: Any = None):
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        self.embedding, self.position = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(TOKENS, WIDTH)
        self.mixed = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a bias of keys has no gradient but rounding
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        places = torch.arange(first, first + tokens.shape[1])
        hidden = self.embedding(tokens) + self.position(places)
        query, key, value = self.mixed(hidden).chunk(3, dim=-1)
        if self.mesh is not None:
            parts = [DTensor.from_local(each, self.mesh, [Shard(1)]) for each in (key, value)]
            key, value = (each.full_tensor(grad_placements=[Partial()]) for each in parts)
        mask = places[:, None] >= torch.arange(key.shape[1])
        return self.head(hidden + functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def batch(step: int, data: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, of which more are ignored in the first half of the sequence."""
    random = torch.Generator().manual_seed(10 * step + data)
    tokens = torch.randint(WORDS, (2, TOKENS + 1), generator=random)
    labels = tokens[:, 1:].clone()
    labels[:, : 3 + data] = -100
    return tokens[:, :-1], labels


def trained_in_parts(rank: int, stage: int) -> tuple[list[float], list[torch.Tensor]]:
    """Train on two ranks with other data and two with other parts of each sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    data, part = mesh.get_coordinate()
    model = Attends(mesh["cp"])
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, mesh=mesh, max_grad_norm=0.5)
    losses = []
    for step in range(STEPS):
        tokens, labels = batch(step, data)
        mine = slice(part * TOKENS // 2, (part + 1) * TOKENS // 2)
        counted = torch.tensor([int((labels[:, mine] != -100).sum())])
        dist.all_reduce(counted)  # the tokens of all ranks
        logits = model(tokens[:, mine], mine.start).flatten(0, 1)
        loss = functional.cross_entropy(logits, labels[:, mine].flatten(), reduction="sum") * mesh.size() / counted.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    optimizer.close()
    return losses, [each.detach() for each in model.parameters()]


def test_ranks_with_parts_of_a_sequence_train_as_one():
    model = Attends()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for step in range(STEPS):
        tokens, labels = (torch.cat(each) for each in zip(batch(step, 0), batch(step, 1)))
        loss = functional.cross_entropy(model(tokens, 0).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for stage in (2, 3):
        for losses, parameters in run_ranks(4, trained_in_parts, stage):
            assert losses == pytest.approx(expected, rel=1e-5)
            for mine, theirs in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
