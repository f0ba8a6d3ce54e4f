"""Trainings on imitated hosts with an outer optimizer, and the same with plain torch."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ballast
import torch
import torch.distributed as dist
from ballast.outer import host_group
from ballast.outer.host_group import HostGroup
from ballast.wrapper.collectives import sum_in_fp32
from python.wrap.support.loops import Loop, Run, mean_square, mean_square_in_bfloat16, mlp

Trained = tuple[list[float], list[torch.Tensor]]
Changes = dict[str, Any]  # of the loop


def loop_of(rank: int, **changes: Any) -> Loop:
    return Loop(rank=rank, ranks=dist.get_world_size(), **changes)


def train(rank: int, configurations: list[dict[str, Any]], changes: Changes | None = None) -> list[Trained]:
    """Train in each configuration of wrap(), and return the losses and the final parameters."""
    trained = []
    for options in configurations:
        run = loop_of(rank, **(changes or {})).run(**options)
        trained.append(result_of(run))
        run.optimizer.close()
    return trained


def result_of(run: Run) -> Trained:
    with ballast.gather(run.model):
        return run.losses, run.parameters


def from_other_values(rank: int, configurations: list[dict[str, Any]], recorded: bool) -> list[list[torch.Tensor]]:
    """Train two steps from values that differ on all ranks."""

    def make_model() -> torch.nn.Module:
        torch.manual_seed(rank)
        return torch.nn.Sequential(torch.nn.Linear(20, 96), torch.nn.Tanh(), torch.nn.Linear(96, 5))  # one is recorded

    def make_recorded() -> torch.nn.Module:
        with ballast.deferred():
            return make_model()

    loop = loop_of(rank, steps=2, make_model=make_recorded if recorded else make_model)
    return [result_of(loop.run(**options))[1] for options in configurations]


def with_another_default_format(rank: int, folder: str, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return the parameters at the end, and those of a training that was resumed, where new tensors are bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    changes: Changes = {"loss": mean_square_in_bfloat16}
    kept = train_and_save(rank, folder, options, 3, 6, changes)
    [resumed] = resume(rank, folder, [options], 3, 6, changes)
    return [kept[1], resumed[1]]


def reports(rank: int, options: dict[str, Any]) -> tuple[str, dict[str, float]]:
    run = loop_of(rank).run(**options)
    return run.optimizer.memory(), run.optimizer.metrics()


def exchanged(rank: int, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return the parameters before and after exchange()."""
    run = loop_of(rank).run(**options)
    before = result_of(run)[1]
    run.optimizer.exchange()
    return [before, result_of(run)[1]]


def with_scheduler(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    loop = loop_of(rank, micro_steps=2)
    model = loop.make_model()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return result_of(replace(loop, after_step=lambda *_: scheduler.step()).train(model, optimizer))[1]


def error_of(rank: int, options_of: dict[int, dict[str, Any]]) -> str:
    """Return the error that a rank gets with its options."""
    try:
        loop_of(rank, steps=4).run(timeout=20, **options_of.get(rank, options_of[0]))
    except (ballast.Error, TypeError) as error:
        return str(error)
    return ""


def thaws(rank: int, options: dict[str, Any]) -> str:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **options)
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].bias.requires_grad_(False)
    try:
        mean_square(model, torch.ones(20)).backward()
    except ballast.Error as error:
        return str(error)
    return ""


# --- Checkpoints ---


def train_and_save(
    rank: int, folder: str, options: dict[str, Any], steps: int, until: int, changes: Changes | None = None
) -> Trained:
    """Save after some steps, and return what the training has at the end."""
    loop = loop_of(rank, steps=steps, **(changes or {}))
    run = loop.run(**options)
    ballast.save(folder, run.model, run.optimizer, extra={"rank": rank})
    return result_of(replace(loop, steps=until).train(run.model, run.optimizer, steps))


def resume(
    rank: int, folder: str, configurations: list[dict[str, Any]], steps: int, until: int, changes: Changes | None = None
) -> list[Trained]:
    trained = []
    for options in configurations:
        loop = loop_of(rank, steps=until, **(changes or {}))
        model = loop.make_model()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1.0), model, **options)
        ballast.load_checkpoint(folder, model, optimizer)
        trained.append(result_of(loop.train(model, optimizer, steps)))
        optimizer.close()
    return trained


def resume_on_one_host(rank: int, folder: str, options: dict[str, Any]) -> int:
    """Load the checkpoint of one host without an outer optimizer."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1.0), model, **options)
    ballast.load_checkpoint(folder, model, optimizer)
    steps: int = optimizer.steps
    loop_of(rank, steps=steps + 1).train(model, optimizer, steps)
    return int(optimizer.steps)


# --- Lost hosts ---

Lines = list[str]
Average = Callable[[HostGroup, torch.Tensor], torch.Tensor]


class Heard(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: Lines = []
        logging.getLogger("ballast").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_between_steps(rank: int, lost: int, step: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies after a step."""
    heard, ended = Heard(), [0]

    def after_step(*_: Any) -> None:
        ended[0] += 1
        if rank == lost and ended[0] == step:
            die()

    run = loop_of(rank, steps=8, after_step=after_step).run(**options)
    return result_of(run), heard.lines


def lose_and_fail(rank: int, lost: int, options: dict[str, Any]) -> str:
    try:
        lose_between_steps(rank, lost, 5, options)
    except ballast.FailureError as error:
        return str(error)
    return ""


def lose_in_exchange(rank: int, lost: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies when the first chunk of the second exchange is summed."""
    heard, average, exchanges = Heard(), HostGroup.average, [0]
    host_group.CHUNK = 64

    def average_and_die(group: HostGroup, values: torch.Tensor) -> torch.Tensor:
        exchanges[0] += 1
        if rank == lost and exchanges[0] == 2:
            sum_in_fp32(group.group, values[:64])
            die()
        return average(group, values)

    HostGroup.average = average_and_die  # type: ignore[method-assign]
    run = loop_of(rank, steps=8).run(**options)
    return result_of(run), heard.lines


def lose_at_the_end_of_an_exchange(rank: int, lost: int, misses: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies when the first exchange is complete, and another one does not know that it is."""
    heard, average, exchanges = Heard(), HostGroup.average, [0]

    def average_and_fail(group: HostGroup, values: torch.Tensor) -> torch.Tensor:
        exchanges[0] += 1
        averages = average(group, values)
        if exchanges[0] == 1 and rank == lost:
            die()
        if exchanges[0] == 1 and rank == misses:
            error = ballast.FailureError("planted")
            error.what_happened = f"rank {lost} died"
            raise error
        return averages

    HostGroup.average = average_and_fail  # type: ignore[method-assign]
    run = loop_of(rank, steps=8).run(**options)
    return result_of(run), heard.lines


# --- The same with plain torch ---


@dataclass(frozen=True)
class PlainTorch:
    """A training on several hosts. `due` has, for each fragment, the place of its exchange in `every` steps, and its
    parameters. `lost` is a host, and the number of steps from which on it takes part in no exchange."""

    hosts: int
    ranks: int
    every: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    due: Sequence[tuple[int, slice]] = ()
    steps: int = 6
    clip: float | None = None
    lost: tuple[int, int] | None = None

    def train(self) -> list[list[torch.Tensor]]:
        """Return the parameters of each host."""
        models = [mlp() for _ in range(self.hosts)]
        inner = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        outer = [torch.nn.Parameter(parameter.detach().clone()) for parameter in models[0].parameters()]
        due = self.due or [(self.every, slice(None))]
        nesterov = self.nesterov and self.momentum > 0
        options = {"lr": self.lr, "momentum": self.momentum, "nesterov": nesterov}
        optimizers = [torch.optim.SGD(outer[part], **options) for _, part in due]
        for step in range(self.steps):
            for host, (model, optimizer) in enumerate(zip(models, inner)):
                self._step(host, model, optimizer, step)
            left = [model for host, model in enumerate(models) if not self._is_lost(host, step)]
            for (place, part), optimizer in zip(due, optimizers):
                if step % self.every == place - 1:
                    exchange(outer[part], [[*model.parameters()][part] for model in left], optimizer)
        return [[parameter.detach() for parameter in model.parameters()] for model in models]

    def _step(self, host: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for rank in range(host * self.ranks, (host + 1) * self.ranks):
            batch = Loop(rank=rank, ranks=self.hosts * self.ranks).batch(step)
            (mean_square(model, batch) / self.ranks).backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad()

    def _is_lost(self, host: int, step: int) -> bool:
        return self.lost is not None and host == self.lost[0] and step >= self.lost[1]


@torch.no_grad()
def exchange(
    outer: Sequence[torch.nn.Parameter], of_hosts: Sequence[Sequence[torch.Tensor]], optimizer: torch.optim.Optimizer
) -> None:
    for number, copy in enumerate(outer):
        copy.grad = torch.stack([copy - mine[number] for mine in of_hosts]).mean(0)
    optimizer.step()
    for mine in of_hosts:
        for parameter, copy in zip(mine, outer):
            parameter.copy_(copy)
