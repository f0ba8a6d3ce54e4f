"""Runs that other ranks continue, another stage or another format, next to checkpoints that they load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.kept_runs import Layers, Stoppable, kept_in, train
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import mean_square
from python.wrap.support.stored import state_of
from torch.distributed.device_mesh import DeviceMesh

Seen = tuple[int, list[dict[str, Any]], list[float]]  # the first step, the state of this rank, the losses from there on


class Wrapped:
    """A training with or without a run."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, dtype=torch.float32, **options: Any):
        self.model = Layers().to(dtype)
        self.optimizer = ballast.wrap(kind(self.model.parameters(), lr=1e-2), self.model, **keywords(**options))

    def train(self, steps: int, rank: int = 0) -> list[float]:
        losses = []
        for _ in range(steps):
            seed = torch.Generator().manual_seed(10 * self.optimizer.steps + rank)
            batch = torch.randn(8, 20, generator=seed)
            loss = mean_square(self.model, batch.to(next(self.model.parameters()).dtype))
            losses.append(loss.item())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def seen(self, rank: int = 0) -> Seen:
        began_at, state = self.optimizer.steps, state_of(self.optimizer)
        losses = self.train(2, rank)
        self.optimizer.close()
        return began_at, state, losses


def begin(folder: Path, rank: int = 0, steps: int = 3, **options: Any) -> None:
    """Train a run for some steps, and save a checkpoint of its end."""
    wrapped = Wrapped(**{**kept_in(folder), **options})
    wrapped.train(steps, rank)
    ballast.save(folder / "checkpoint", wrapped.model, wrapped.optimizer)
    wrapped.optimizer.close()


def begun_on_ranks(rank: int, folder: str) -> None:
    """Train a run for two more steps than its checkpoint has."""
    begin(Path(folder), rank)
    train(Layers(), rank, 5, **kept_in(Path(folder)))


def mirrored_on_ranks(rank: int, folder: str) -> tuple[str, list[float], list[tuple[int, list[float]]]]:
    """Train a run whose ranks mirror each other, and lose each rank's drive once. Return the error where both have one drive,
    the losses of a training without a run, and what each start has."""
    shared, own = Path(folder, "shared"), Path(folder, f"drive-{rank}")
    for drive in (shared, own):
        drive.mkdir(exist_ok=True)
    try:
        train(Layers(), rank, 1, mirror=True, **kept_in(shared))
        refused = ""
    except ballast.ResourceError as error:
        refused = str(error)
    starts = []
    for until in (2, 4, 6):
        starts.append(train(Layers(), rank, until, mirror=True, **kept_in(own)))
        dist.barrier()
        if rank == until // 2 % 2:
            shutil.rmtree(own)
            own.mkdir()
        dist.barrier()
    return refused, train(Layers(), rank, 6, stage=3)[1], starts


def mirrored_and_killed(rank: int, folder: str, victim: int | None) -> tuple[int, list[float]] | str:
    """Train a run whose ranks mirror each other. The victim is killed while it updates a tile of the third step; another rank
    returns its error. Without a victim, return the step at which the start begins, and the losses."""
    drive = Path(folder, f"drive-{rank}")
    drive.mkdir(parents=True, exist_ok=True)
    Stoppable.stops = rank == victim
    try:
        return train(Layers(), rank, 5, kind=Stoppable, elementwise=True, tile=128, mirror=True, **kept_in(drive))
    except ballast.FailureError as error:
        return str(error)


def continued(folder: Path, rank: int = 0, **options: Any) -> tuple[Seen, Seen]:
    """Return what the run and what a training that loads the checkpoint have, with these options."""
    options = {**kept_in(folder), **options}
    of_run = Wrapped(**options).seen(rank)
    other = Wrapped(**{key: value for key, value in options.items() if key != "run"})
    ballast.load_checkpoint(folder / "checkpoint", other.model, other.optimizer)
    return of_run, other.seen(rank)


def on_other_ranks(rank: int, folder: str, kinds: list[type[torch.optim.Optimizer]]) -> list[tuple[Seen, Seen]]:
    """Train on 3 ranks, then on 2 of them in another stage, then on 3 again. Return each pair of what ranks have."""
    pair = dist.new_group([0, 1])
    pairs = []
    for kind in kinds:
        here = Path(folder, kind.__name__)
        if rank == 0:
            here.mkdir()
        dist.barrier()
        begin(here, rank, kind=kind, tile=128)
        dist.barrier()
        if rank < 2:
            pairs.append(continued(here, rank, kind=kind, stage=2, mesh=DeviceMesh.from_group(pair, "cpu")))
        dist.barrier()
        begin(here, rank, kind=kind, steps=0)
        pairs.append(continued(here, rank, kind=kind))
        dist.barrier()
    return pairs
