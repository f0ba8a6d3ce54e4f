"""Trainings in which parameters get no gradient in some steps, or in none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import torch
from python.wrap.support.keywords import keywords

STEPS = 9


class Branches(torch.nn.Module):
    """Layers of which one has a turn in every third step only, on all ranks or on one, and one is never used."""

    def __init__(self, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(20, 20, bias)
        self.branch = torch.nn.Linear(20, 20, bias)
        self.never = torch.nn.Linear(20, 20, bias)
        self.last = torch.nn.Linear(20, 20, bias)

    def forward(self, batch: torch.Tensor, takes_branch: bool = False) -> torch.Tensor:
        batch = torch.tanh(self.first(batch))
        return self.last(self.branch(batch) if takes_branch else batch)


class OneUnit(torch.nn.Module):
    """The same in a single block: a unit of stage 3 of which a rank uses a part."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.block = Branches(bias)

    def forward(self, batch: torch.Tensor, takes_branch: bool = False) -> torch.Tensor:
        return self.block(batch, takes_branch)


def takes_branch(step: int, part: int, alone: bool) -> bool:
    return step % 3 == 1 and (part == 0 or not alone)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    parts: range,
    *,
    alone: bool = False,
    set_to_none: bool = True,
) -> None:
    """Train on these parts of each batch, one by one. If `alone`, the first part alone takes the branch."""
    for step in steps:
        for part in parts:
            batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + part))
            (model(batch, takes_branch(step, part, alone)).square().mean() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


Made = Callable[[Any], torch.optim.Optimizer]


def counts_of(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """Return the count of steps of each parameter; None where the state_dict() of this rank has none."""
    state = optimizer.state_dict()["state"]
    steps = [state.get(number, {}).get("step") for number in range(sum(len(each["params"]) for each in optimizer.param_groups))]
    return [None if each is None else float(each) for each in steps]


def values_and_counts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()], counts_of(optimizer)


def trained(
    rank: int, kind: Callable[[], torch.nn.Module], make: Made, configurations: list[dict], parts: int, ranks: int, **how: Any
) -> list[Any]:
    """Return the values and the counts of steps of a training in each configuration. A rank has every part of so many."""
    found = []
    for options in configurations:
        model = kind()
        optimizer = ballast.wrap(make(model.parameters()), model, **keywords(**options))
        train(model, optimizer, range(STEPS), range(rank, parts, ranks), **how)
        found.append(values_and_counts(model, optimizer))
        optimizer.close()
    return found


def resumed(rank: int, folder: Path, options: dict, steps: range, parts: int, ranks: int) -> Any:
    """Train for these steps, of which a checkpoint or the run has those before. Return the values and the counts of steps."""
    model = Branches()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), model, **keywords(**options))
    saves = "run" not in options
    if saves and steps.start > 0:
        ballast.load_checkpoint(folder, model, optimizer)
    assert optimizer.steps == steps.start
    train(model, optimizer, steps, range(rank, parts, ranks))
    if saves:
        ballast.save(folder, model, optimizer)
    found = values_and_counts(model, optimizer)
    optimizer.close()
    return found
