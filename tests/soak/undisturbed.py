"""Trains as many steps as a checkpoint has, on one rank, in memory and undisturbed, and compares every bit with the checkpoint:
undisturbed.py FOLDER. It prints the first difference, if any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ballast
import torch
from soak.training import Soaked, soaked, train_step


def everything(model: Soaked, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for number, values in optimizer.state_dict()["state"].items():
        for kind, value in values.items():
            yield f"{kind} of parameter {number}", torch.as_tensor(value)


def first_difference(folder: Path) -> str:
    torch.set_num_threads(1)
    model, optimizer = soaked(stage=0)
    ballast.load_checkpoint(folder / "checkpoints", model, optimizer)
    expected_model, expected_optimizer = soaked(stage=0)
    while expected_optimizer.steps < optimizer.steps:
        train_step(expected_model, expected_optimizer)
    pairs = zip(everything(model, optimizer), everything(expected_model, expected_optimizer), strict=True)
    for (name, value), (other_name, expected) in pairs:
        if name != other_name or not torch.equal(value, expected):
            return f"{name} differs after step {optimizer.steps}"
    return ""


if __name__ == "__main__":
    difference = first_difference(Path(sys.argv[1]))
    print(difference or "the same bits")
    sys.exit(1 if difference else 0)
