"""The programs that `plan()` forecasts and that the call runs which the plan prints. Ranks run this."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WIDTH = 1024  # a matrix has several tiles, which the host and the GPU share


class Block(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Tower(torch.nn.Module):
    """An embedding, blocks and a head, which may have the embedding's weight."""

    def __init__(self, width: int = 64, *, tied: bool = False, frozen: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(96, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 96, bias=False)
        if tied:
            self.head.weight = self.words.weight
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        self.to(dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Configuration:
    """Options of `plan()`, of the model, and the steps after which the training knows the order of its gradients."""

    options: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    steps: int = 0


def cpu_plan(path: Path) -> dict[str, Any]:
    rates = dict.fromkeys(("peers", "host_memory", "read", "write"), 1e9)
    figures = {"device": "cpu", "memory": 16 << 30, "flops": 1e11, "cores": 2, "rates": rates}
    path.write_text(json.dumps({"ballast_bench": 1, "measured": figures}))
    return {"measured": path}


def gpu_plan() -> dict[str, Any]:
    """Return the GPU that the wrapped training takes the emulated one for."""
    from ballast.planning.hardware import GPUS, gpu_like
    from ballast.torch.gpu import name_and_bytes

    found = gpu_like(*name_and_bytes(0))
    return {"gpu": next(name for name, gpu in GPUS.items() if gpu is found), "host_memory": "1TiB"}


def optimizers_of(model: torch.nn.Module, kind: str) -> Any:
    if kind != "muon":
        return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind](model.parameters(), lr=1e-3)
    matrices = [each for each in model.blocks.parameters() if each.dim() == 2]
    ids = {id(each) for each in matrices}
    others = [each for each in model.parameters() if id(each) not in ids]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def programs(rank: int, ranks: int, device: str, directory: Path, each: Configuration) -> tuple[str, str]:
    """Return the program of the training, and the one that the plan has for its units and the order of their uses."""
    import ballast
    from ballast.torch.parameters import units
    from ballast.torch.parameters.units import first_trace, model_of

    units.UNIT_ELEMENTS = 2 * each.model.get("width", 64) ** 2  # several units, also below stage 3

    model = Tower(**each.model).to(device)
    hardware = cpu_plan(directory / f"measured{rank}.json") if device == "cpu" else gpu_plan()
    plan = ballast.plan(model, ranks=ranks, drive_space="1TiB", **{**hardware, **each.options})
    optimizer = optimizers_of(model, plan.optimizer)
    known: Mapping[str, Any] = {"ballast": ballast, "model": model, "optimizer": optimizer}
    if plan.optimizer == "muon":
        known = {**known, "muon": optimizer[0], "adamw": optimizer[1]}
    wrapped = eval(plan.wrap_call().replace("DIRECTORY", str(directory)), dict(known))
    several = wrapped if isinstance(wrapped, list) else [wrapped]
    for _ in range(each.steps):
        for _ in range(plan.micro_steps):
            model(torch.arange(8, device=device)).float().square().mean().backward()
        for one in several:
            one.step()
            one.zero_grad()
    found, expected = [], []
    for one in several:
        partition = one._ballast.partition_now()
        found.append(partition.core.program())
        question = copy.copy(plan._question)
        question.model = model_of(partition.units)
        question.set_rule(partition._rules[0])
        question.set_work([(0.0, 0.0)] * len(partition.units))
        question.trace = first_trace(partition.units, question.model, plan.stage)
        question.set_other(None)
        expected.append(question.program(plan._placement, rank=rank))
    for one in reversed(several):
        one.close()
    return "\n".join(found), "\n".join(expected)


def on_ranks(rank: int, ranks: int, package: Path | None, directory: Path, those: list[Configuration]) -> list[tuple[str, str]]:
    """Return the programs of each configuration, on emulated GPUs if `package` is theirs, else on CPUs."""
    device = "cpu"
    if package is not None:
        from python.wrap.support.emulated_ranks import use_gpu

        use_gpu(rank, package)
        device = "emulated"
    return [programs(rank, ranks, device, directory, each) for each in those]


