"""Optimizers that the library has no rule for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from python.wrap.support.loops import Loop, Run

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True, "weight_decay": 0.01}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Rprop, {"lr": 1e-3}),
    (torch.optim.ASGD, {"lr": 1e-1, "t0": 2}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
]


class UserOptimizer(torch.optim.Optimizer):
    """A user's own optimizer. It counts its steps in the group and in an attribute, but not in its state."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "calls": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.3)
                parameter.sub_(mean / (1 + mean.abs()), alpha=group["lr"] / group["calls"])


def train_on_batches_of_all_ranks(loop: Loop) -> Run:
    """Train in one process, with a plain optimizer, on the batches of all ranks."""
    model = loop.make_model()
    optimizer = loop.make_optimizer(model.parameters(), **loop.optimizer_options)
    losses = []
    for step in range(loop.steps):
        for micro in range(loop.micro_steps):
            for rank in range(loop.ranks):
                loss = loop.loss(model, replace(loop, rank=rank).batch(step * loop.micro_steps + micro))
                (loss / (loop.micro_steps * loop.ranks)).backward()
                if rank == loop.rank:
                    losses.append(loss.item())
        if loop.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
        optimizer.zero_grad()
    return Run(model, optimizer, losses)


def on_drive(path: Path, **options: Any) -> dict[str, Any]:
    return {"offload": {"state": f"nvme:{path}"}, "tile": 128, **options}


def own_step_loop(
    kind: type[torch.optim.Optimizer] = torch.optim.NAdam, options: dict[str, Any] | None = None, **changes: Any
) -> Loop:
    return Loop(make_optimizer=kind, optimizer_options=options or {"lr": 1e-2}, **changes)


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the values of optimizer.state, read now."""
    return [{name: value * 1 for name, value in optimizer.state[each].items()} for each in parameters_in(optimizer)]


def parameters_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_same_state(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert [sorted(values) for values in one] == [sorted(values) for values in other]
    for mine, theirs in zip(one, other):
        assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])) for name in mine)
