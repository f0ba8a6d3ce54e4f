"""Train the GPT of 30 million parameters in one case, and return its validation losses.

The parameters are bf16. Forward and backward passes compute in fp32 on the values of the parameters, and the gradients arrive
in bf16: CPUs without bf16 arithmetic compute faster so.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ballast
import gpt
import torch
from texts import Text
from torch.func import functional_call
from variants import FINE_TUNING, Case, Task

LAYERS, WIDTH, HEADS, CONTEXT = 6, 640, 10, 64
MICRO_STEPS = 2  # gradients in bf16 are rounded stochastically from the second one on
POINTS = 20  # of a curve
SEQUENCES = 64  # that a point of a curve is the mean loss of; the last loss has eight times as many
LOWEST_RATE = 0.1  # the learning rate falls to this part of the highest


def setting(task: Task, steps: int) -> str:
    """Return in words what decides the losses, besides the formats, the seed and the text."""
    tokens = f"{MICRO_STEPS} sequences of {CONTEXT} bytes a step, one at a time"
    schedule = f"learning rate {task.learning_rate:g} after {task.warm_up * steps:g} steps, falling to {LOWEST_RATE:g} of it"
    return f"{LAYERS} layers of width {WIDTH}, {steps} steps, {tokens}, AdamW, {schedule}"


class Losses(NamedTuple):
    curve: list[tuple[int, float]]  # steps, and the mean loss of a few held-out sequences
    last: float  # the mean loss of more of them


class Run:
    """One model, its optimizer with the formats of a case, and the text."""

    def __init__(self, case: Case, text: Text, steps: int, start: dict[str, torch.Tensor]):
        torch.manual_seed(case.seed)
        self.model = gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT).to(torch.bfloat16)
        if case.task == FINE_TUNING:
            self.model.load_state_dict(start)
        self.case, self.text, self.steps = case, text, steps
        plain = torch.optim.AdamW(self.model.parameters(), lr=case.task.learning_rate)
        formats = case.variant
        self.optimizer = ballast.wrap(
            plain, self.model, state_format=formats.state, gradient_format=formats.gradients, threads=1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(step, steps, case.task.warm_up))

    def train(self, unfinished: Path) -> Losses:
        """Train to the end. Until then the folder has a checkpoint of each point of the curve, and a stopped run continues."""
        curve = self.resume(unfinished)
        for step in range(self.optimizer.steps, self.steps):
            self.step(step)
            if (step + 1) % (self.steps // POINTS) == 0:
                curve.append((step + 1, self.validate(SEQUENCES)))
                progress = {"curve": curve, "schedule": self.schedule.state_dict()}
                ballast.save(unfinished, self.model, self.optimizer, extra=progress)
        shutil.rmtree(unfinished)
        return Losses(curve, self.validate(8 * SEQUENCES))

    def resume(self, unfinished: Path) -> list[tuple[int, float]]:
        """Load the checkpoint, if there is one. Return the points of the curve so far."""
        if not unfinished.exists():
            return []
        progress = ballast.load_checkpoint(unfinished, self.model, self.optimizer)
        self.schedule.load_state_dict(progress["schedule"])
        return progress["curve"]

    def step(self, step: int) -> None:
        for micro_step in range(MICRO_STEPS):
            number = 1_000_000 * self.case.seed + MICRO_STEPS * step + micro_step
            (self.loss(*gpt.batch(self.text.trained, number, 1, CONTEXT)) / MICRO_STEPS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def loss(self, inputs: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        widened = {name: parameter.float() for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, widened, (inputs, following))

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
