"""Train a GPT of 30 million parameters, and return its validation losses. A training that was stopped continues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ballast
import gpt
import torch
from texts import Text
from variants import POINTS, Task

LAYERS, WIDTH, HEADS, CONTEXT = 6, 640, 10, 64
MICRO_STEPS = 2  # gradients in bf16 are rounded stochastically from the second one on
SEQUENCES = 64  # that a point of a curve is the mean loss of; the last loss has eight times as many
LOWEST_RATE = 0.1  # the learning rate falls to this part of the highest


def setting(task: Task, steps: int, update: str) -> str:
    """Return in words what decides the losses, besides what a suite compares, the seed and the text."""
    tokens = f"{MICRO_STEPS} sequences of {CONTEXT} bytes a step, one at a time"
    schedule = f"learning rate {task.learning_rate:g} after {task.warm_up * steps:g} steps, falling to {LOWEST_RATE:g} of it"
    return f"{LAYERS} layers of width {WIDTH}, {steps} steps, {tokens}, {update}, {schedule}"


class Losses(NamedTuple):
    curve: list[tuple[int, float]]  # steps, and the mean loss of a few held-out sequences
    last: float  # the mean loss of more of them


class Plan(NamedTuple):
    """How long a model is trained, on which batches, and at which learning rates."""

    task: Task
    seed: int
    steps: int

    def model(self, dtype: torch.dtype) -> gpt.GPT:
        """Return the model that the seed begins with."""
        torch.manual_seed(self.seed)
        return gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT).to(dtype)

    def rate(self, step: int) -> float:
        return rate(step, self.steps, self.task.warm_up)


class Training:
    """One model, the text, and optimizers that Ballast has wrapped."""

    checkpoint = "checkpoint.json"  # a folder without this file has none

    def __init__(self, plan: Plan, text: Text, model: gpt.GPT, optimizers: Sequence[torch.optim.Optimizer]):
        self.plan, self.text, self.model = plan, text, model
        self.optimizers = list(optimizers)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: plan.rate(step)) for each in self.optimizers]

    def train(self, unfinished: Path) -> Losses:
        """Train to the end. Until then the folder has a checkpoint of each point of the curve, and a stopped run continues."""
        curve = self.resume(unfinished)
        for step in range(curve[-1][0] if curve else 0, self.plan.steps):
            self.step(step)
            if (step + 1) % (self.plan.steps // POINTS) == 0:
                curve.append((step + 1, self.validate(SEQUENCES)))
                schedules = [schedule.state_dict() for schedule in self.schedules]
                self.save(unfinished, {"curve": curve, "schedules": schedules})
        last = self.validate(8 * SEQUENCES)
        self.remove(unfinished)
        return Losses(curve, last)

    def resume(self, unfinished: Path) -> list[tuple[int, float]]:
        """Load the checkpoint, if there is one. Return the points of the curve so far."""
        if not (unfinished / self.checkpoint).exists():
            return []
        progress = self.load(unfinished)
        for schedule, state in zip(self.schedules, progress["schedules"], strict=True):
            schedule.load_state_dict(state)
        return progress["curve"]

    def save(self, unfinished: Path, progress: dict[str, Any]) -> None:
        ballast.save(unfinished, self.model, self.optimizers, extra=progress)

    def load(self, unfinished: Path) -> dict[str, Any]:
        return ballast.load_checkpoint(unfinished, self.model, self.optimizers)

    def remove(self, unfinished: Path) -> None:
        shutil.rmtree(unfinished)

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()

    def step(self, step: int) -> None:
        batches = self.batches(step)
        for batch in batches:
            (self.loss(*batch) / len(batches)).backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batches of a step, on which this process trains one after the other."""
        first = 1_000_000 * self.plan.seed + MICRO_STEPS * step
        return [gpt.batch(self.text.trained, first + micro_step, 1, CONTEXT) for micro_step in range(MICRO_STEPS)]

    def loss(self, inputs: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return self.model(inputs, following)

    def validate(self, sequences: int) -> float:
        with torch.no_grad():
            losses = [self.loss(*part).item() for part in spread_over(self.text.held_out, sequences)]
        return sum(losses) / len(losses)


def spread_over(text: torch.Tensor, sequences: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield sequences at equal distances, in batches."""
    begins = torch.linspace(0, len(text) - CONTEXT - 1, sequences).long()
    for some in begins.split(16):
        rows = text[some[:, None] + torch.arange(CONTEXT + 1)].long()
        yield rows[:, :-1], rows[:, 1:]


def rate(step: int, steps: int, warm_up: float) -> float:
    """Return the part of the highest learning rate: it rises, and then falls linearly."""
    rising = (step + 1) / (warm_up * steps)
    falling = 1 - (1 - LOWEST_RATE) * (step / steps - warm_up) / (1 - warm_up)
    return min(rising, falling)
