"""Trainings that several files of tests run, most of them on ranks. Other processes can find them by name."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import ballast
import torch
import torch.distributed as dist
from ballast.tiers import read_activation_options
from ballast.wrap_options import WrapOptions
from python.wrap.support.custom_optimizers import train_on_batches_of_all_ranks
from python.wrap.support.loops import Loop, Tower, keywords, mean_square, mlp

Trained = tuple[list[float], list[torch.Tensor]]


def loop_of(rank: int, **changes: Any) -> Loop:
    return Loop(rank=rank, ranks=dist.get_world_size(), **changes)


def in_every_configuration(rank: int, training: dict[str, Any], configurations: list[dict[str, Any]]) -> list[Trained]:
    """Train with torch's DistributedDataParallel first, then in each configuration."""
    loop = loop_of(rank, **training)
    model = torch.nn.parallel.DistributedDataParallel(loop.make_model())
    run = loop.train(model, loop.make_optimizer(model.parameters(), **loop.optimizer_options))
    trained = [(run.losses, run.parameters)]
    for options in configurations:
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append((run.losses, run.parameters))
    return trained


class Routed(torch.nn.Module):
    """A model in which each rank uses an expert of its own, and no rank uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(20, 20)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(20, 5) for _ in range(3)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts[dist.get_rank() % 2](self.first(batch))
        return result


def towers(
    rank: int,
    checkpointing: str,
    configurations: list[dict[str, Any]],
    micro_steps: int = 2,
    clip: float | None = 0.5,
    autocast: bool = False,
) -> list[Trained]:
    trained = []
    for options in configurations:
        loop = loop_of(
            rank, make_model=partial(Tower, checkpointing), micro_steps=micro_steps, clip=clip, autocast=autocast
        )
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append((run.losses, run.parameters))
    return trained


def custom_optimizers(
    rank: int, kind: Any, options: dict[str, Any], configurations: list[dict[str, Any]]
) -> tuple[Trained, list[Trained]]:
    """Return the run of one process with all ranks' batches, and the runs of this rank in each configuration."""
    loop = loop_of(rank, make_optimizer=kind, optimizer_options=options, micro_steps=2, clip=0.05)
    plain = train_on_batches_of_all_ranks(loop)
    runs = [loop.run(**configuration) for configuration in configurations]
    for run in runs:
        run.optimizer.close()
    return (plain.losses, plain.parameters), [(run.losses, run.parameters) for run in runs]


def own_step_of_changing_parameters(
    rank: int, stage: int | None, options: Mapping[str, Any] = types.MappingProxyType({})
) -> list[torch.Tensor]:
    """Train while parameters are added, freeze and thaw. Without a stage, one process trains on all ranks' batches."""
    body, head = mlp(), torch.nn.Linear(5, 3)
    torch.manual_seed(1)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model = torch.nn.Sequential(body, head)
    optimizer = torch.optim.NAdam(body.parameters(), lr=1e-2)
    loop = loop_of(rank)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, **keywords(stage=stage, **options))
    for step in range(9):
        if step == 3:
            optimizer.add_param_group({"params": head.parameters(), "lr": 3e-2})
        if step in (5, 7):
            body[0].requires_grad_(step == 7)
        ranks = [rank] if stage is not None else range(loop.ranks)
        for each in ranks:
            (mean_square(model, replace(loop, rank=each).batch(step)) / len(ranks)).backward()
        optimizer.step()
        model.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_and_offload(loop: Loop, offloads: bool, **options: Any) -> Trained:
    """Train, and evaluate after each step. If `offloads` is set, also offload and reload after each step."""
    evaluated: list[float] = []

    def after_step(model: torch.nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            evaluated.append(loop.loss(model, loop.batch(100)).item())
        if offloads:
            optimizer.offload()
            optimizer.reload()

    run = replace(loop, after_step=after_step).run(**options)
    with ballast.gather(run.model):
        return run.losses + evaluated, run.parameters


def step_on_ones(model, optimizer):
    model(torch.ones(20)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated(**options):
    """Return a model that has trained for a step and was evaluated. In stage 3 its last unit is still gathered."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    units = {"units": "Linear"} if options.get("stage", 3) == 3 else {}
    optimizer = ballast.wrap(optimizer, model, **keywords(**{"stage": 3, **units, **options}))
    step_on_ones(model, optimizer)
    with torch.no_grad():
        model(torch.ones(20))
    return model, optimizer


def freeze_a_layer(model, optimizer):
    model[0].requires_grad_(False)


SMALL = {"min_bytes": 1, "in_flight": "2MiB"}


@contextmanager
def offloading_everything() -> Iterator[None]:
    """Let wrap() offload activations of any size inside the block."""
    with patch.object(vars(WrapOptions)["activations"], "read", partial(read_activation_options, **SMALL)):
        yield


def tower_loop(checkpointing: str = "none", **options: Any) -> Loop:
    return Loop(make_model=partial(Tower, checkpointing), micro_steps=2, clip=0.5, steps=3, **options)


class Heard(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("ballast").addHandler(self)
        logging.getLogger("ballast").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
