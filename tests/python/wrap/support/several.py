"""Trainings of one model with two optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ballast
import torch
from python.wrap.support.loops import Loop, Tower, keywords

Optimizers = list[Any]
Make = Callable[[list[torch.nn.Parameter], list[torch.nn.Parameter]], Optimizers]


def of_matrices_and_vectors(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the parameters to train, so that most modules have some of each optimizer."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() == 1]


def with_own_steps(matrices: Any, vectors: Any) -> Optimizers:
    """Return two optimizers that run torch's own step, whose bits wrap() keeps."""
    return [torch.optim.RMSprop(matrices, lr=1e-3, momentum=0.5), torch.optim.Adamax(vectors, lr=1e-2)]


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


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and all(map(torch.equal, one[1], other[1])))


MUON_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.02},
    "like AdamW": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "momentum": 0.2},
    "original": {"lr": 0.02, "adjust_lr_fn": "original", "nesterov": False, "ns_steps": 4, "eps": 1e-6},
}


def muon_of(options: dict[str, Any]) -> Make:
    """Return the function that makes the two optimizers."""

    def make(matrices: Any, vectors: Any) -> list[Any]:
        return [torch.optim.Muon(matrices, **options), torch.optim.AdamW(vectors, lr=1e-2)]

    return make
