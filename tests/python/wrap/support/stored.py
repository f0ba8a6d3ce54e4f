"""Trainings with an optimizer's own step on state that the library keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from python.wrap.support.loops import Loop


def on_drive(path: Path, **options: Any) -> dict[str, Any]:
    return {"offload": {"state": f"nvme:{path}"}, "tile": 128, **options}


def loop_of(
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
