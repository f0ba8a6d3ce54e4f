"""Trainings of named runs, for the tests of resuming."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import ballast
import torch
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import mean_square


class Layers(torch.nn.Module):
    """Layers of the same shape, declared in the order of `names`, of which two are used."""

    def __init__(self, names: tuple[str, ...] = ("one", "two")):
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            setattr(self, name, torch.nn.Linear(20, 20))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(batch)))


def kept_in(folder: Path, stage: int = 3) -> dict:
    return {"stage": stage, "offload": {"state": f"nvme:{folder}"}, "run": "mine"}


def train(
    model: torch.nn.Module,
    rank: int,
    until: int,
    data: int = 0,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options,
) -> tuple[int, list[float]]:
    """Train up to step `until`. Return the step from which the run was resumed, and the losses from there on."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = ballast.wrap(kind(trained, lr=1e-2), model, **keywords(**options))
    began_at = optimizer.steps
    losses = losses_until(until, model, optimizer, rank, data)
    optimizer.close()
    return began_at, losses


def losses_until(
    until: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, data: int = 0
) -> list[float]:
    losses = []
    for step in range(optimizer.steps, until):
        seed = torch.Generator().manual_seed(1000 * data + 10 * step + rank)
        loss = mean_square(model, torch.randn(8, 20, generator=seed))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Stoppable(torch.optim.NAdam):
    """If it `stops`, ends its process while it updates the second tile of its third step."""

    stops = False

    of_step = 0  # tiles of the third step

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        steps = {int(self.state[each]["step"]) for group in self.param_groups for each in group["params"]}
        if steps == {3}:  # a tile of padding has none
            Stoppable.of_step += 1
        if self.stops and Stoppable.of_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_stopped(folder: str) -> None:
    Stoppable.stops = True
    train(Layers(), 0, 5, kind=Stoppable, elementwise=True, tile=128, **kept_in(Path(folder)))


def directory_of(folder: Path, rank: int) -> Path:
    return folder / f"mine-rank-{rank}"


def replace(directory: Path, by: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(by, directory)


def refused_and_resumed(rank: int, folder: str) -> tuple[str, int]:
    """Return the error of resuming with another layer, and the step at which the run itself resumes afterwards."""
    options = kept_in(Path(folder))
    train(Layers(), rank, 3, **options)
    try:
        train(Layers(("one", "two", "three")), rank, 4, **options)
    except ballast.UsageError as error:
        began_at, _ = train(Layers(), rank, 4, **options)
        return str(error).partition("\n  raised at")[0], began_at
    return "", -1


def stopped_between_commits(rank: int, folder: str) -> list[int]:
    """Return the step from which each start of a run resumes. One start ends after rank 0 has committed step 3 and before
    rank 1 has. The next one trains on other data, and ends after rank 1 has committed and before rank 0 has."""
    kept, copies = Path(folder, "kept"), Path(folder, "copies")
    kept.mkdir(exist_ok=True)
    own = directory_of(kept, rank)
    began = [train(Layers(), rank, 2, **kept_in(kept))[0]]
    replace(copies / f"2-{rank}", own)
    began.append(train(Layers(), rank, 3, **kept_in(kept))[0])
    replace(copies / f"3-{rank}", own)
    if rank == 1:
        replace(own, copies / "2-1")
    began.append(train(Layers(), rank, 3, data=1, **kept_in(kept))[0])
    if rank == 0:
        replace(own, copies / "3-0")
    began.append(train(Layers(), rank, 3, data=2, **kept_in(kept))[0])
    return began
