"""Trainings of one model with two optimizers, whose runs are resumed together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.kept_runs import Layers
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import mean_square

Make = Callable[[Layers], list[Any]]


def rules(model: Layers) -> list[Any]:
    return [torch.optim.AdamW(model.one.parameters(), lr=1e-2), torch.optim.SGD(model.two.parameters(), lr=0.1, momentum=0.9)]


def rule_and_own_step(model: Layers) -> list[Any]:
    return [torch.optim.AdamW(model.one.parameters(), lr=1e-2), torch.optim.NAdam(model.two.parameters(), lr=1e-2)]


def muon_and_adamw(model: Layers) -> list[Any]:
    matrices, vectors = [model.one.weight, model.two.weight], [model.one.bias, model.two.bias]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-2)]


@dataclass
class Joint:
    """A training, each of whose rounds is a step of both optimizers."""

    folder: Path
    make: Make = rules
    options: dict[str, Any] = field(default_factory=dict)
    infinite: Collection[int] = ()  # rounds in which the second optimizer's gradients are not finite
    unused: Collection[int] = ()  # rounds in which the second optimizer has no gradients
    rank: int = 0

    def begin(self) -> tuple[Layers, list[Any]]:
        self.folder.mkdir(exist_ok=True)
        model = Layers()
        options = {"stage": 3, "offload": {"state": f"nvme:{self.folder}"}, "run": "mine", **self.options}
        return model, ballast.wrap(self.make(model), model, **keywords(**options))

    def backward(self, model: Layers, number: int) -> None:
        seed = torch.Generator().manual_seed(10 * number + self.rank)
        used = model.one if number in self.unused else model
        mean_square(used, torch.randn(8, 20, generator=seed)).backward()

    def rounds(self, model: Layers, optimizers: list[Any], until: int, after_step: Callable[[], None] = lambda: None) -> None:
        for number in range(optimizers[0].steps, until):
            self.backward(model, number)
            for optimizer in optimizers:
                is_infinite = number in self.infinite and optimizer is optimizers[1]
                optimizer.found_inf = torch.tensor(1.0 if is_infinite else 0.0)
                optimizer.step()
                after_step()
                optimizer.zero_grad()

    def values(self, model: Layers, optimizers: list[Any]) -> list[torch.Tensor]:
        """Return the parameters and the state, and close the optimizers."""
        with ballast.gather(model):
            values = [each.detach().clone() for each in model.parameters()]
        for optimizer in optimizers:
            entries = [entry for state in optimizer.state_dict()["state"].values() for entry in state.values()]
            values += [torch.as_tensor(entry).clone() for entry in entries]
            optimizer.close()
        return values

    def run(self, until: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return the steps at which the optimizers began, and the values at the end."""
        model, optimizers = self.begin()
        began_at = [each.steps for each in optimizers]
        self.rounds(model, optimizers, until)
        return began_at, self.values(model, optimizers)

    def run_and_copy(self, until: int, copies: Path, *, together: bool = False) -> list[torch.Tensor]:
        """Copy the folder after each step of each optimizer, when it is committed on this rank, or `together` on all. Return
        the values at the end."""
        model, optimizers = self.begin()

        def copy() -> None:
            for optimizer in optimizers:
                optimizer._ballast.wait_for_commit()
            if together:
                dist.barrier()
            shutil.copytree(self.folder, copies / f"{len(list(copies.iterdir())):02}")
            if together:
                dist.barrier()

        copies.mkdir()
        copy()
        self.rounds(model, optimizers, until, copy)
        return self.values(model, optimizers)


def stopped_on_ranks(rank: int, folder: str) -> tuple[list[list[int]], bool]:
    """Return the steps at which each start begins. Rank 0 is set back to the moment between the steps of a round, and then all
    ranks to the end of the round before, where rank 1 had begun the next one. Also return whether the values at the end are
    those of a training that was not stopped."""
    kept, copies = Path(folder, "kept"), Path(folder, f"copies-{rank}")
    training = Joint(kept, rule_and_own_step, rank=rank)
    whole = training.run_and_copy(4, copies)
    began = []
    for of_rank_0, of_rank_1 in ((3, 4), (5, 4), (6, 7), (8, 7)):
        _set_back(kept, copies / f"{(of_rank_0, of_rank_1)[rank]:02}", rank)
        began_at, values = training.run(4)
        began.append(began_at)
    return began, all(map(torch.equal, whole, values))


def begun_on_ranks(rank: int, folder: str) -> list[torch.Tensor]:
    """Return the values after two rounds. The folder `stopped` has the records of a moment in the third one."""
    stopped, whole = Path(folder, "stopped"), Path(folder, "whole")
    _, values = Joint(whole, rule_and_own_step, rank=rank).run(2)
    training = Joint(stopped, rule_and_own_step, rank=rank)
    training.run_and_copy(3, Path(folder, f"copies-{rank}"))
    _set_back(stopped, Path(folder, f"copies-{rank}", ("05", "04")[rank]), rank)
    return values


def mirrored_on_ranks(rank: int, folder: str) -> tuple[list[int], bool]:
    """Return the steps at which a start begins whose rank 1 has lost its drive in the middle of a round, and whether the
    values at the end are those of a training that was not stopped."""
    drive, copies = Path(folder, f"drive-{rank}"), Path(folder, f"copies-{rank}")
    training = Joint(drive, rule_and_own_step, {"mirror": True}, rank=rank)
    whole = training.run_and_copy(4, copies, together=True)
    shutil.rmtree(drive)
    if rank == 0:
        shutil.copytree(copies / "05", drive)
    began_at, values = training.run(4)
    if rank == 0:
        for mirror in drive.rglob("mirror*.records"):
            with mirror.open("r+b") as file:
                file.write(b"damaged")
    dist.barrier()
    assert training.run(5)[0] == [4, 4]
    return began_at, all(map(torch.equal, whole, values))


def copied_on_ranks(rank: int, folder: str, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Return the steps at which a start begins that was stopped when rank 0 had committed the last round and rank 1 had not,
    and whether the values are those of the whole training. Rank 0 has a copy of the records of rank 1."""
    drive, copies = Path(folder, f"drive-{rank}"), Path(folder, f"copies-{rank}")
    training = Joint(drive, rule_and_own_step, options, rank=rank)
    whole = training.run_and_copy(4, copies, together=True)
    shutil.rmtree(drive)
    shutil.copytree(copies / ("08", "07")[rank], drive)
    began_at, values = training.run(4)
    return began_at, all(map(torch.equal, whole, values))


def _set_back(kept: Path, copy: Path, rank: int) -> None:
    for name in (f"mine-rank-{rank}", f"mine-optimizer-1-rank-{rank}"):
        shutil.rmtree(kept / name)
        shutil.copytree(copy / name, kept / name)
