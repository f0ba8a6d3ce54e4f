"""Trainings that change their trained parameters or their state on the way."""

from __future__ import annotations

from typing import Any

import ballast
import torch
from python.wrap.support.bodies import Trained, loop_of
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import mlp


def step(model, optimizer):
    model(torch.ones(20)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated(**options):
    """Return a model that has trained for a step and was evaluated. In stage 3 its last unit is still gathered."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    units = {"units": "Linear"} if options.get("stage", 3) == 3 else {}
    optimizer = ballast.wrap(optimizer, model, **keywords(**{"stage": 3, **units, **options}))
    step(model, optimizer)
    with torch.no_grad():
        model(torch.ones(20))
    return model, optimizer


def freeze_a_layer(model, optimizer):
    model[0].requires_grad_(False)


def freezes(rank: int, configurations: list[dict[str, Any]]) -> list[Trained]:
    """Freeze a layer after two steps, and thaw it two steps later."""
    trained = []
    for options in configurations:
        loop, model = loop_of(rank, steps=6), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
        losses = []
        for first in (0, 2, 4):
            model[0].requires_grad_(first != 2)
            loop.steps = first + 2
            run = loop.train(model, optimizer, first)
            losses += run.losses
        with ballast.gather(model):
            trained.append((losses, run.parameters))
    return trained


def begins_again(rank: int, configurations: list[dict[str, Any]]) -> list[Trained]:
    """Clear the optimizer's state after two steps, and replace a part of it after four."""
    trained = []
    for options in configurations:
        loop, model = loop_of(rank, steps=2), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
        loop.train(model, optimizer)
        optimizer.state.clear()
        loop.steps = 4
        losses = loop.train(model, optimizer, 2).losses
        optimizer.state[model[0].weight] = {}
        optimizer.state[model[2].weight]["exp_avg"] = torch.full((5, 24), 0.01)
        loop.steps = 6
        run = loop.train(model, optimizer, 4)
        with ballast.gather(model):
            trained.append((losses + run.losses, run.parameters))
    return trained


def loses_some_state(rank: int) -> str:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=2)
    loop_of(rank, steps=1).train(model, optimizer)
    del optimizer.state[model[2].weight]
    try:
        model(torch.ones(20)).sum().backward()
    except ballast.UsageError as error:
        return str(error)
    return "nothing"


def others_freeze(rank: int, kind: Any, configurations: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train a bf16 layer whose updates are smaller than the spacing of its values: alone, and while another layer repeatedly
    freezes and thaws."""

    def trained(freezes: bool, options: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(40, 24), torch.nn.Linear(8, 8)]).to(torch.bfloat16)
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        model.forward = lambda batch: model[0](batch)
        optimizer = ballast.wrap(kind(model.parameters(), lr=3e-4), model, **keywords(**options))
        for step in range(16):
            model[1].requires_grad_(not (freezes and step % 3 == 1))
            batch = torch.linspace(1, 2, 40, dtype=torch.bfloat16) * (1 + rank + step % 2)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with ballast.gather(model):
            return model[0].weight.detach().clone()

    return [(trained(False, options), trained(True, options)) for options in configurations]
