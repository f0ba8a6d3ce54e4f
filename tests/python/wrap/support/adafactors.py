"""A model whose parameters have every kind of shape that Adafactor tells apart, and trainings of it."""

from __future__ import annotations

import copy
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.custom_optimizers import train_on_batches_of_all_ranks
from python.wrap.support.loops import Loop, Run

Trained = tuple[list[float], dict[str, torch.Tensor]]


class Shapes(torch.nn.Module):
    """Matrices, a stack of them, convolutions of one point, a single column and a single row, vectors, a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(20, 24)
        self.experts = torch.nn.Parameter(torch.randn(3, 24, 7) * 0.2)
        self.point = torch.nn.Conv1d(7, 5, 1)
        self.window = torch.nn.Conv1d(5, 4, 3, padding=1)
        self.column = torch.nn.Parameter(torch.randn(12, 1))
        self.row = torch.nn.Parameter(torch.randn(1, 12))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.layer(batch))
        by_expert = torch.einsum("bi,eij->bje", inner, self.experts)
        result: torch.Tensor = self.window(torch.tanh(self.point(by_expert))).flatten(1)
        return self.scale * result @ self.column @ self.row


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {"lr": 0.03, "weight_decay": 0.1, "eps": (1e-3, 1e-2), "d": 1.5, "beta2_decay": -0.5, "maximize": True},
}


def loop_of(options: dict[str, Any], **changes: Any) -> Loop:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Loop(
        make_model=Shapes, make_optimizer=torch.optim.Adafactor, optimizer_options=options, rank=rank, ranks=ranks, **changes
    )


def parameters_of(run: Run) -> dict[str, torch.Tensor]:
    with ballast.gather(run.model):
        return {name: value.detach().clone() for name, value in run.model.named_parameters()}


def in_every_configuration(
    rank: int, options: dict[str, Any], configurations: list[dict[str, Any]]
) -> tuple[Trained, list[Trained]]:
    """Return the run of one process with all ranks' batches, and the runs of this rank in each configuration."""
    loop = loop_of(options, micro_steps=2, clip=0.5)
    plain = train_on_batches_of_all_ranks(loop)
    runs = []
    for configuration in configurations:
        run = loop.run(**configuration)
        runs.append((run.losses, parameters_of(run)))
        run.optimizer.close()
    return (plain.losses, dict(plain.model.named_parameters())), runs


def trained_and_saved(rank: int, folder: str) -> list[float]:
    """Save after three steps, and return the losses of three more."""
    run = loop_of({}, steps=3).run(stage=3)
    ballast.save(folder, run.model, run.optimizer)
    return loop_of({}, steps=6).train(run.model, run.optimizer, 3).losses


def resumed(rank: int, folder: str, stages: list[int]) -> list[list[float]]:
    """Return the losses of three steps after loading, in each of these stages."""
    losses = []
    for stage in stages:
        model = Shapes()
        optimizer = ballast.wrap(torch.optim.Adafactor(model.parameters()), model, stage=stage)
        ballast.load_checkpoint(folder, model, optimizer)
        losses.append(loop_of({}, steps=6).train(model, optimizer, 3).losses)
        optimizer.close()
    return losses


def state_after_loading(rank: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's state of matrices, by the parameter's name."""
    model = Shapes()
    optimizer = ballast.wrap(torch.optim.Adafactor(model.parameters()), model, stage=2)
    ballast.load_checkpoint(folder, model, optimizer)
    state = {name: copy.deepcopy(optimizer.state.get(each, {})) for name, each in model.named_parameters()}
    optimizer.close()
    return {name: values for name, values in state.items() if "row_var" in values}
