"""Models for the tests of construction, and the functions of these tests that ranks run."""

from __future__ import annotations

import ctypes
import hashlib

import ballast
import torch
from python.wrap.support.resident import peak_resident
from torch import nn


class Positions(nn.Module):
    """A module with two computed buffers, one of which is in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(200, 64)
        place = torch.arange(200).float()[:, None]
        pace = torch.exp(torch.arange(0, 64, 2) * -0.1)
        table[:, 0::2] = torch.sin(place * pace)
        table[:, 1::2] = torch.cos(place * pace)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))


class Zoo(nn.Module):
    """A model with every kind of initialization that we know models to use."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.own = nn.Parameter(torch.randn(50, 50) * 0.02)
        self.small = nn.Linear(4, 4)
        self.orthogonal = nn.Linear(60, 60)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Linear(60, 60)
        nn.init.trunc_normal_(self.truncated.weight, std=1.5)  # redraws the values that lie outside
        self.sparse = nn.Linear(60, 60)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.embedding = nn.Embedding(100, 30, padding_idx=3)
        self.recurrent = nn.LSTM(50, 40)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2)  # copies its layer
        self.convolution = nn.Conv2d(20, 30, 3)
        self.half = nn.Linear(60, 60).to(torch.bfloat16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(60, 60))
        self.tied = nn.Linear(60, 60)
        self.tied.weight = self.orthogonal.weight
        with torch.no_grad():
            self.convolution.weight.mul_(2).add_(self.convolution.weight.flip(0))
        for name, parameter in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / 8**0.5)
        self.chances = torch.linspace(0, 1, 5).tolist()


class Tall(nn.Module):
    """A model of linear layers. Most of its values are in blocks that are gathered one by one."""

    def __init__(self, width: int = 48, blocks: int = 4):
        super().__init__()
        self.first = nn.Linear(20, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
        self.last = nn.Linear(width, 5)
        self.apply(self.initialize)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            nn.init.zeros_(module.bias)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.blocks(self.norm(self.first(batch))))
        return result


def constructs_with_its_own_seed(rank: int) -> list[list[torch.Tensor]]:
    """Return the initial parameters in stages 2 and 3, where each rank has set its own seed."""
    made = []
    for stage in (2, 3):
        torch.manual_seed(rank)
        with ballast.deferred():
            model = Tall()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
        with ballast.gather(model):
            made.append([parameter.detach().clone() for parameter in model.parameters()])
        optimizer.close()
    return made


def constructs_differently(rank: int) -> str:
    with ballast.deferred():
        model = Tall()
        if rank == 1:
            torch.nn.init.ones_(model.blocks[0].weight), torch.nn.init.normal_(model.blocks[0].weight)
    try:
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    except ballast.Error as error:
        return str(error)
    return ""


def large_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(76)))


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        with ballast.gather(parameter):
            digest.update(ctypes.string_at(parameter.data_ptr(), parameter.nbytes))
    return digest.hexdigest()


def begins_within_memory(rank: int, origin: str, folder: str) -> tuple[int, str]:
    """Return the memory that it takes until training can begin, and a digest of the parameters at that point."""
    with ballast.deferred():
        Tall()  # torch's lazy imports are then not measured
    before = peak_resident(begin=True)
    if origin == "checkpoint":
        with torch.device("meta"):
            model = large_model()
    else:
        with ballast.deferred():
            model = large_model()
    kept = {kind: f"nvme:{folder}/drive" for kind in ("parameters", "state")}
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters()), model, stage=3, offload={**kept, "gradients": "host"})
    if origin == "checkpoint":
        ballast.load(model, folder)
    optimizer.memory()
    return peak_resident() - before, digest_of(model)
