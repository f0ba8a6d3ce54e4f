"""Trainings of adapters over a frozen base that is larger than all else."""

from __future__ import annotations

import ballast
import torch
from python.wrap.support.loops import keywords

WIDE, LAYERS, RANK = 256, 8, 4
BASE = LAYERS * WIDE * WIDE * 4  # bytes of the frozen parameters


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(WIDE, WIDE, bias=False).requires_grad_(False)
        self.down = torch.nn.Linear(WIDE, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, WIDE, bias=False)

    def forward(self, batch):
        return batch + torch.tanh(self.base(batch) + self.up(self.down(batch)))


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Adapted() for _ in range(LAYERS)))


def train(model, optimizer, rank=0, first=0, steps=3):
    device = next(model.parameters()).device
    losses = []
    for number in range(first, first + steps):
        batch = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * number + rank)).to(device)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(model):
    with ballast.gather(model):
        return [each.detach().cpu().clone() for each in model.parameters()]


def moved(tier, folder):
    """Return the mapping that moves parameters and state there."""
    word = f"nvme:{folder}" if tier == "nvme" else tier
    return None if tier == "device" else {"parameters": word, "state": word}


def wrapped(model, **options):
    trained = [each for each in model.parameters() if each.requires_grad]
    return ballast.wrap(torch.optim.AdamW(trained, lr=1e-2), model, **keywords(stage=3, **options))
