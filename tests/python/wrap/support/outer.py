"""Trainings on imitated hosts with an outer optimizer, with Ballast and in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ballast
import torch
from python.wrap.support.bodies import Trained, loop_of
from python.wrap.support.loops import Loop, Run, keywords, mean_square, mlp

Changes = dict[str, Any]  # changes of the loop


def result_of(run: Run) -> Trained:
    with ballast.gather(run.model):
        return run.losses, run.parameters


def resume(
    rank: int, folder: str, configurations: list[dict[str, Any]], steps: int, until: int, changes: Changes | None = None
) -> list[Trained]:
    trained = []
    for options in configurations:
        loop = loop_of(rank, steps=until, **(changes or {}))
        model = loop.make_model()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1.0), model, **keywords(**options))
        ballast.load_checkpoint(folder, model, optimizer)
        trained.append(result_of(loop.train(model, optimizer, steps)))
        optimizer.close()
    return trained


# --- The same in plain torch ---


@dataclass(frozen=True)
class Before:
    """The training that another one resumes after some steps."""

    steps: int
    hosts: int
    ranks: int
    has_outer: bool = True


@dataclass(frozen=True)
class PlainTorch:
    """A training on several hosts. `due` has, for each fragment, the step of its exchange in `every` steps, and its
    parameters. `lost` is a host, and the number of steps from which on it takes part in no exchange. With `halves_every`, a
    scheduler halves the learning rate."""

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
    micro_steps: int = 1
    halves_every: int | None = None
    before: Before | None = None

    def train(self) -> list[list[torch.Tensor]]:
        """Return the parameters of each host."""
        before = self.before or Before(0, self.hosts, self.ranks)
        model = mlp()
        trainings = copies_of([(model, torch.optim.AdamW(model.parameters(), lr=1e-2))], before.hosts)
        outer = Outer(self, trainings[0][0])
        for step in range(self.steps):
            ranks = before.ranks if step < before.steps else self.ranks
            if step == before.steps:
                trainings = copies_of(trainings, self.hosts)
                outer = outer if before.has_outer else Outer(self, trainings[0][0])
            for host, (model, optimizer) in enumerate(trainings):
                self._step((host, ranks, len(trainings)), model, optimizer, step)
            left = [model for host, (model, _) in enumerate(trainings) if not self._is_lost(host, step)]
            if step >= before.steps or before.has_outer:
                outer.exchange_due(left, step)
        return [[parameter.detach() for parameter in model.parameters()] for model, _ in trainings]

    def _step(self, where: tuple[int, int, int], model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        host, ranks, hosts = where
        for rank in range(host * ranks, (host + 1) * ranks):
            for micro in range(self.micro_steps):
                batch = Loop(rank=rank, ranks=hosts * ranks).batch(step * self.micro_steps + micro)
                (mean_square(model, batch) / ranks / self.micro_steps).backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        if self.halves_every is not None:
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 ** (step // self.halves_every)
        optimizer.step()
        optimizer.zero_grad()

    def _is_lost(self, host: int, step: int) -> bool:
        return self.lost is not None and host == self.lost[0] and step >= self.lost[1]


Training = tuple[torch.nn.Module, torch.optim.Optimizer]


def copies_of(trainings: Sequence[Training], hosts: int) -> list[Training]:
    """Return a training for each host. Additional hosts begin with copies."""
    return [copy.deepcopy(trainings[host % len(trainings)]) for host in range(hosts)]


class Outer:
    """The outer optimizer of all hosts."""

    def __init__(self, options: PlainTorch, model: torch.nn.Module):
        self._copy = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        self._due = options.due or [(options.every, slice(None))]
        self._every = options.every
        nesterov = options.nesterov and options.momentum > 0
        of_all = {"lr": options.lr, "momentum": options.momentum, "nesterov": nesterov}
        self._optimizers = [torch.optim.SGD(self._copy[part], **of_all) for _, part in self._due]

    @torch.no_grad()
    def exchange_due(self, models: Sequence[torch.nn.Module], step: int) -> None:
        for (due, part), optimizer in zip(self._due, self._optimizers):
            if step % self._every == due - 1:
                exchange(self._copy[part], [[*model.parameters()][part] for model in models], optimizer)


def exchange(
    outer: Sequence[torch.nn.Parameter], of_hosts: Sequence[Sequence[torch.Tensor]], optimizer: torch.optim.Optimizer
) -> None:
    for number, each in enumerate(outer):
        each.grad = torch.stack([each - mine[number] for mine in of_hosts]).mean(0)
    optimizer.step()
    for mine in of_hosts:
        for parameter, each in zip(mine, outer):
            parameter.copy_(each)


def check_close(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float = 2e-6) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def is_equal(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
