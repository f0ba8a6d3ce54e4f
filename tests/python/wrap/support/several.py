"""Trainings of one model with two optimizers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, Tower, mlp

Optimizers = list[Any]
Make = Callable[[list[torch.nn.Parameter], list[torch.nn.Parameter]], Optimizers]


def of_matrices_and_vectors(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the parameters to train, so that most modules have some of each optimizer."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() == 1]


def with_own_steps(matrices: Any, vectors: Any) -> Optimizers:
    """Return two optimizers that run torch's own step, whose bits wrap() keeps."""
    return [torch.optim.RMSprop(matrices, lr=1e-3, momentum=0.5), torch.optim.Adamax(vectors, lr=1e-2)]


def with_rules(matrices: Any, vectors: Any) -> Optimizers:
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]


def of_one_kind(matrices: Any, vectors: Any) -> Optimizers:
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=2e-2, betas=(0.8, 0.9), weight_decay=0.0)]


def rule_and_own_step(matrices: Any, vectors: Any) -> Optimizers:
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.RMSprop(vectors, lr=1e-3)]


def tower(checkpointing: str = "none", width: int = 16) -> Tower:
    """Return a model in which torch and Ballast do the same: without unused parameters, whose gradients differ."""
    model = Tower(checkpointing, width)
    model.unused.requires_grad_(False)
    return model


@dataclass
class Several:
    """A training with two optimizers."""

    make: Make = with_own_steps
    checkpointing: str = "none"
    every: int = 1  # steps of the second optimizer for one of the first
    micro_steps: int = 1
    clip: float | None = None
    autocast: bool = False
    deferred: bool = False
    width: int = 16
    steps: int = 4
    change: Callable[[int, torch.nn.Module, Optimizers], None] = lambda step, model, optimizers: None  # a change before a step
    loop: Loop = field(default_factory=Loop)

    def begin(self, *, one_by_one: bool = False, **options: Any) -> tuple[torch.nn.Module, Optimizers]:
        """Return the model and the optimizers. With options, they are wrapped."""
        with ballast.deferred() if self.deferred else nullcontext():
            model = tower(self.checkpointing, self.width).to(self.loop.device)
        optimizers = self.make(*of_matrices_and_vectors(model))
        if options and one_by_one:
            optimizers = [ballast.wrap(each, model, **keywords(**options)) for each in optimizers]
        elif options:
            optimizers = ballast.wrap(optimizers, model, **keywords(**options))
        return model, optimizers

    def backward(self, model: torch.nn.Module, step: int, rank: int, parts: int) -> float:
        loop = replace(self.loop, rank=rank)
        with torch.autocast(loop.device, torch.bfloat16, enabled=self.autocast):
            loss = loop.loss(model, loop.batch(step))
        (loss / parts).backward()
        return loss.item()

    def train(self, model: torch.nn.Module, optimizers: Optimizers, first: int = 0, steps: int = 4) -> list[float]:
        """Train, and return the losses of this rank. A plain optimizer trains on the batches of all ranks."""
        first_one, second = optimizers
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma) for each, gamma in zip(optimizers, (0.9, 0.8))]
        is_plain = not isinstance(first_one, ballast.WrappedOptimizer)
        ranks = range(self.loop.ranks) if is_plain else [self.loop.rank]
        losses = []
        for step in range(first, first + steps):
            self.change(step, model, optimizers)
            for micro in range(step * self.micro_steps, (step + 1) * self.micro_steps):
                parts = self.micro_steps * len(ranks)
                of_ranks = [self.backward(model, micro, rank, parts) for rank in ranks]
                losses.append(of_ranks[self.loop.rank if is_plain else 0])
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            for scheduler, optimizer in zip(schedulers, optimizers):
                if optimizer is second or step % self.every == self.every - 1:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return losses

    def run(self, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
        """Return the losses and the parameters at the end."""
        model, optimizers = self.begin(**options)
        losses = self.train(model, optimizers, steps=self.steps)
        if not options:
            return losses, values_of(model)
        with ballast.gather(model):
            values = values_of(model)
        for optimizer in optimizers:
            optimizer.close()
        return losses, values


def with_a_plain_optimizer(rank: int, stage: int, in_data_parallel: bool) -> dict[str, list[str]]:
    """Return what this rank is told if the second optimizer of a model is plain, if its parameters are frozen, if both
    optimizers are wrapped, and if they are wrapped one by one after the first one's plan was made."""
    said: dict[str, list[str]] = {}
    for name in ("plain", "frozen", "all", "one by one"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.LayerNorm(4, bias=False))
        one, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[1:]))
        model[1:].requires_grad_(name != "frozen")
        called = torch.nn.parallel.DistributedDataParallel(model) if in_data_parallel else model
        if name == "all":
            one, other = ballast.wrap([one, other], model, stage=stage)
        else:
            one = ballast.wrap(one, model, stage=stage)
        if name == "one by one":
            one.memory()
            other = ballast.wrap(other, model, stage=stage)
        with heard() as said[name]:
            for _ in range(2):
                called(torch.ones(2, 4)).sum().backward()
                one.step(), other.step()
                one.zero_grad(), other.zero_grad()
    return said


@contextmanager
def heard() -> Iterator[list[str]]:
    """Return the warnings of Ballast inside the block, and its error that ends the block."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ballast").addHandler(handler)
    try:
        yield lines
    except ballast.Error as error:
        lines.append(str(error))
    finally:
        logging.getLogger("ballast").removeHandler(handler)


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and all(map(torch.equal, one[1], other[1])))


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    """Return what two ranks do: trainings in several configurations, and a checkpoint of one of them."""
    training = Several(rule_and_own_step, loop=Loop(rank=rank, ranks=dist.get_world_size()))
    found: dict[str, Any] = {"plain": training.run()}
    drive = {"parameters": f"nvme:{folder}", "state": "host"}
    for name, options in {
        "stage 0": {"stage": 0},
        "stage 2": {"stage": 2, "offload": "host"},
        "stage 3": {"stage": 3},
        "drive": {"stage": 3, "offload": {**drive, "state": f"nvme:{folder}"}},
    }.items():
        found[name] = training.run(**options)
    alternating = replace(training, every=2)
    model, optimizers = alternating.begin(stage=3)
    alternating.train(model, optimizers, 0, 3)  # the first one has gradients of a step that it has not made
    optimizers[0].zero_grad()
    with ballast.gather(model), torch.no_grad():
        model.blocks[1].up.weight.mul_(2.0)  # no optimizer has it
    ballast.save(f"{folder}/saved", model, optimizers, extra={"rank": rank})
    states = [copy.deepcopy(each.state_dict()) for each in optimizers]
    found["longer"] = training.train(model, optimizers, 4, 2)
    again, resumed = training.begin(stage=2)
    found["extra"] = ballast.load_checkpoint(f"{folder}/saved", again, resumed)
    found["steps"] = [each.steps for each in resumed]
    found["resumed"] = training.train(again, resumed, 4, 2)
    third, optimizers = training.begin(stage=3)
    ballast.load(third, f"{folder}/saved")  # the parameters alone: the states come as state_dict()
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict(state)
    found["reloaded"] = training.train(third, optimizers, 4, 2)
    return found


def trains_a_head_itself(rank: int, ranks: int, stage: int, directory: str) -> list[torch.Tensor]:
    """Train a model whose head a plain optimizer has, which begins frozen. Save and load in the middle. Return the parameters.
    Without a stage, one rank trains with plain torch on the batches of all."""
    loop = Loop(ranks=ranks)

    def begin() -> tuple[torch.nn.Module, list[Any]]:
        model = mlp()
        body = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        head = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        return model, [body if stage < 0 else ballast.wrap(body, model, stage=stage, tuning=ballast.Tuning(timeout=20)), head]

    model, optimizers = begin()
    for step in range(6):
        model[2].requires_grad_(step > 0)
        model[0].bias.requires_grad_(step != 1)  # makes another partition
        for each in [rank] if stage >= 0 else range(ranks):
            (loop.loss(model, replace(loop, rank=each).batch(step)) / (1 if stage >= 0 else ranks)).backward()
        for parameter in model[2].parameters() if stage >= 0 and step > 0 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3 and stage >= 0:
            ballast.save(directory, model, optimizers[0], extra=optimizers[1].state_dict())
            model, optimizers = begin()
            optimizers[1].load_state_dict(ballast.load_checkpoint(directory, model, optimizers[0]))
    assert stage < 0 or all(type(each) is torch.nn.Parameter for each in model[2].parameters())
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()]
