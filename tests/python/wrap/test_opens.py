"""Tests of how many files ranks open to load a checkpoint: a file system does not carry N^2 opens for N ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ballast
import fsspec
import pytest
import torch
from ballast.checkpoint.remote import push
from ballast.ranks import from_all_ranks
from python.wrap.support import opens
from python.wrap.support.ranks import run_ranks

FEW, MANY = 2, 8  # ranks


class WithBuffers(torch.nn.Module):
    """Has parameters in all ranks' shards, and small buffers, which ranks save in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(64) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            rows = norm(layer(rows))
        return rows


def digest(model: torch.nn.Module) -> str:
    values = (each.numpy().tobytes() for each in model.state_dict().values())
    return hashlib.sha256(b"".join(values)).hexdigest()


def wrapped(model: torch.nn.Module) -> ballast.WrappedOptimizer:
    return ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)


def training(weights: str = "") -> tuple[torch.nn.Module, ballast.WrappedOptimizer]:
    torch.manual_seed(0)
    with ballast.deferred():
        model = WithBuffers()
    if weights:
        ballast.load(model, weights)
    optimizer = wrapped(model)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save(rank: int, folder: str) -> None:
    ballast.save(folder, *training())


def load_training(rank: int, folder: str) -> int:
    model, optimizer = training()
    ballast.load_checkpoint(folder, model, optimizer)
    return optimizer.steps


def load_weights(rank: int, folder: str) -> int:
    model, optimizer = training()
    ballast.load(model, folder)
    return optimizer.steps


def load_weights_first(rank: int, folder: str) -> int:
    return training(folder)[1].steps


def load_on_first_rank(rank: int, folder: str) -> int:
    """Load a model that each rank has in full. wrap() copies the values of rank 0."""
    torch.manual_seed(rank)
    model = WithBuffers()
    if rank == 0:
        ballast.load(model, folder)
    before = digest(model)
    optimizer = wrapped(model)
    with ballast.gather(model):
        [of_first, *_] = from_all_ranks(optimizer._ballast.group, before)
        return int(digest(model) == of_first)


def counts_of(load: object, folder: Path, ranks: int) -> tuple[int, int]:
    """Return the opens of ranks that load the checkpoint of as many ranks, and of three quarters of them."""
    run_ranks(ranks, save, str(folder))
    counts = []
    for size in (ranks, max(1, ranks * 3 // 4)):
        with opens.counted(folder) as count:
            assert run_ranks(size, load, str(folder)) == [1] * size
        counts += count
    return counts[0], counts[1]


@pytest.mark.parametrize("load", [load_training, load_weights, load_weights_first, load_on_first_rank])
def test_the_files_that_ranks_open_grow_as_their_number_does(load, tmp_path):
    few, many = (counts_of(load, tmp_path / str(ranks), ranks) for ranks in (FEW, MANY))
    for one, other in zip(few, many, strict=True):
        assert FEW <= one and other <= one * MANY // FEW * 5 // 4


def load_from_address(rank: int, address: str) -> int:
    """Return how often this rank has asked the address for a file, or for its size."""
    model, optimizer = training()
    files = type(fsspec.filesystem("file"))
    asked = 0

    def counting(kept):
        def call(self, *args, **options):
            nonlocal asked
            asked += 1
            return kept(self, *args, **options)

        return call

    for name in ("cat_file", "get_file", "info"):
        setattr(files, name, counting(getattr(files, name)))
    ballast.load_checkpoint(address, model, optimizer)
    return asked


def test_calls_of_an_address_grow_as_the_ranks_do(tmp_path):
    asked = []
    for ranks in (FEW, MANY):
        run_ranks(ranks, save, str(tmp_path / f"{ranks}"))
        push(tmp_path / f"{ranks}", f"file://{tmp_path}/pushed-{ranks}")
        asked.append(sum(run_ranks(ranks, load_from_address, f"file://{tmp_path}/pushed-{ranks}")))
    few, many = asked
    assert many <= few * MANY // FEW * 5 // 4
