"""Compare the losses of a GPT of 30 million parameters in each state format and gradient format with those in fp32.

A run of 2,000 steps takes ten minutes of one core with bf16 arithmetic, and hours without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import contest
from contest import FINE_TUNING, TRAINING, Case, Contest, Task

PAIRS = (  # state and gradients; the state split has the bits of fp32
    *(("fp32", "fp32"), ("bf16", "fp32"), ("compact", "fp32"), ("4bit", "fp32")),
    *(("fp32", "bf16"), ("compact", "bf16"), ("4bit", "bf16")),
)
TASKS = {task.name: task for task in (TRAINING, FINE_TUNING)}


def contender(task: Task, state: str, gradients: str) -> str:
    return f"{task.name}, state {state}, gradients {gradients}"


CONTESTS = [
    Contest("formats", "formats", tuple(contender(task, *pair) for pair in PAIRS), ("AdamW in bf16",), task)
    for task in TASKS.values()
]
START = Case(CONTESTS[0].reference, 0)  # fine-tuning begins with its parameters


def training_of(case: Case, steps: int, start: dict[str, Any] | None = None) -> Any:
    """Return the training of a case, which begins with these parameters if there are some."""
    from loss_training import Plan, Training

    name, state, gradients = case.contender.split(", ")
    formats = {"state_format": state.removeprefix("state "), "gradient_format": gradients.removeprefix("gradients ")}
    return Training.in_bf16(Plan(TASKS[name], case.seed, steps), start, **formats)


def start_of(steps: int, folder: Path) -> dict[str, Any]:
    """Return the parameters that fine-tuning begins with. They are trained again if they are lost, or those of another
    setting."""
    import torch

    file = folder / "start.pt"
    if not file.exists() or torch.load(file)["setting"] != CONTESTS[0].setting(steps):
        train(START, steps, folder)
    return torch.load(file)["parameters"]


def train(case: Case, steps: int, folder: Path) -> contest.Losses:
    import torch

    is_tuning = case in CONTESTS[1].cases
    run = training_of(case, steps, start_of(steps * FINE_TUNING.part, folder) if is_tuning else None)
    losses: contest.Losses = run.to_the_end()
    if case == START:
        kept = {"setting": CONTESTS[0].setting(steps), "parameters": run.model.state_dict()}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(kept, folder / "start.pt")
    return losses


def main() -> None:
    contest.Suite(CONTESTS, __doc__, steps=2000, train=train).main()


if __name__ == "__main__":
    main()
