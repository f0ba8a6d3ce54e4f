"""Train a GPT of 30 million parameters, and return its validation losses.

Trainings in formats and with codes have bf16 parameters, and so are activations and arriving gradients: a CPU without bf16
arithmetic takes many times as long. Those with other optimizers are in fp32, because torch's Muon adds its updates to bf16
parameters without a master.
"""

from __future__ import annotations

import functools
import hashlib
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ballast
import gpt
import torch
import torch.distributed as dist
from contest import POINTS, Losses, Task

LAYERS, WIDTH, HEADS, CONTEXT = 6, 640, 10, 64
MICRO_STEPS = 2  # gradients in bf16 are rounded stochastically from the second one on
SEQUENCES = 64  # a point of a curve is their mean loss; the last loss has eight times as many
LOWEST_RATE = 0.1  # the learning rate falls to this part of the highest
HELD_OUT = 10  # each tenth file or topic is for validation


class Text(NamedTuple):
    """A text that is the same on each machine with the pinned torch and the same Python."""

    trained: torch.Tensor
    held_out: torch.Tensor
    digest: str  # the digest of the whole text


@functools.cache
def python_sources() -> Text:
    """Return the Python files of the torch package, without the one that names the build."""
    folder = Path(torch.__file__).parent
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py"))
    return split([(folder / file).read_bytes() for file in files if file != "version.py"])


@functools.cache
def help_topics() -> Text:
    """Return the English of Python's help()."""
    topics = pydoc_data.topics.topics
    return split([topics[name].encode() for name in sorted(topics)])


def split(parts: Sequence[bytes]) -> Text:
    trained = b"".join(part for number, part in enumerate(parts) if number % HELD_OUT)
    held_out = b"".join(parts[::HELD_OUT])
    tensor_of = lambda text: torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Text(tensor_of(trained), tensor_of(held_out), hashlib.sha256(trained + held_out).hexdigest()[:12])


TEXTS: dict[str, Callable[[], Text]] = {
    "torch's Python sources": python_sources,
    "Python's help topics": help_topics,
}


def setting(task: Task, steps: int, update: str, *ranks: str) -> str:
    """Return in words what decides the losses, besides what a suite compares and the seed."""
    tokens = f"{MICRO_STEPS} sequences of {CONTEXT} bytes a step, one at a time"
    schedule = f"learning rate {task.learning_rate:g} after {task.warm_up * steps:g} steps, falling to {LOWEST_RATE:g} of it"
    text = f"text {TEXTS[task.text]().digest}"
    return ", ".join([f"{LAYERS} layers of width {WIDTH}", f"{steps} steps", tokens, update, schedule, *ranks, text])


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
    """One model, the text, and optimizers. Ranks of a job share the sequences of a step."""

    def __init__(self, plan: Plan, model: gpt.GPT, optimizers: Sequence[torch.optim.Optimizer]):
        self.plan, self.text, self.model = plan, TEXTS[plan.task.text](), model
        self.optimizers = optimizers
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: plan.rate(step)) for each in self.optimizers]

    @classmethod
    def with_ballast(
        cls, plan: Plan, model: gpt.GPT, optimizers: Sequence[torch.optim.Optimizer], **options: Any
    ) -> Training:
        """Wrap all optimizers, and return the training."""
        ballast.wrap(optimizers if len(optimizers) > 1 else optimizers[0], model, tuning=ballast.Tuning(threads=1), **options)
        return cls(plan, model, optimizers)

    @classmethod
    def in_bf16(cls, plan: Plan, start: dict[str, Any] | None = None, **options: Any) -> Training:
        """Return a training with AdamW, which begins with these parameters if there are some."""
        model = plan.model(torch.bfloat16)
        if start is not None:
            model.load_state_dict(start)
        return cls.with_ballast(plan, model, [torch.optim.AdamW(model.parameters(), lr=plan.task.learning_rate)], **options)

    def to_the_end(self) -> Losses:
        """Train on one thread, and release what the optimizers hold."""
        torch.set_num_threads(1)
        losses = self.train()
        self.close()
        return losses

    def train(self) -> Losses:
        curve = []
        for step in range(self.plan.steps):
            self.step(step)
            if (step + 1) % (self.plan.steps // POINTS) == 0:
                curve.append((step + 1, self.validate(SEQUENCES)))
        return Losses(curve, self.validate(8 * SEQUENCES))

    def close(self) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, "close", lambda: None)()  # plain optimizers own nothing but memory

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
        if dist.is_initialized():
            return [gpt.batch(self.text.trained, 1_000_000 * self.plan.seed + step, MICRO_STEPS, CONTEXT)]  # this rank's part
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
