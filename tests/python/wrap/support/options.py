"""Rank bodies that wrap with options of their own."""

import logging
from collections.abc import Callable
from typing import Any

import ballast
import torch
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import mean_square, mlp


def schedules_its_own_lr(rank: int, stage: int) -> tuple[str, int]:
    """Train until the learning rate of rank 1 differs. Return the error and the steps."""
    model = mlp()
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, tuning=ballast.Tuning(timeout=20)
    )
    try:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 2e-2 if (rank, step) == (1, 2) else 1e-2 / (step + 1)
            mean_square(model, torch.ones(20)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ballast.Error as error:
        return str(error), optimizer.steps
    return "", optimizer.steps


def trains_with(rank: int, of_ranks: list[dict[str, Any]]) -> tuple[str, int]:
    """Train a step with the options of this rank. Return the error, or nothing, and the steps."""
    options = dict(of_ranks[rank])
    make, group = options.pop("make", torch.optim.AdamW), options.pop("group", {"lr": 1e-2})
    model = mlp()
    optimizer = ballast.wrap(make(model.parameters(), **group), model, **keywords(timeout=20, **options))
    try:
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.Error as error:
        return str(error), optimizer.steps
    return "", optimizer.steps


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))


def with_layers_in_reverse(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for layer in reversed([*model]) for each in layer.parameters()], lr=0.1)


def in_other_groups(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [*model[:2].parameters()]}, {"params": [*model[2].parameters()]}], lr=0.1)


def with_one_less(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters()][:-1], lr=0.1)


def with_another_shape(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    model[0].weight.data = model[0].weight.data.reshape(2, 8)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_another_buffer(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    model[1].register_buffer("seen", torch.zeros(2, device="cpu"))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wraps_what_rank_1_lists(
    rank: int, stages: list[int], lists: list[Callable[[torch.nn.Sequential], torch.optim.Optimizer]]
) -> list[tuple[str, bool]]:
    """Wrap parameters that rank 1 lists differently. Return the errors, and whether they left all values as they were."""
    said = []
    for stage in stages:
        for of_rank_1 in lists:
            torch.manual_seed(rank)
            model = layers()
            plain = of_rank_1(model) if rank == 1 else torch.optim.SGD(model.parameters(), lr=0.1)
            before = [each.detach().clone() for each in model.parameters()]
            error = ""
            try:
                ballast.wrap(plain, model, stage=stage, tuning=ballast.Tuning(timeout=20))
            except ballast.Error as refused:
                error = str(refused)
            said.append((error, all(map(torch.equal, before, model.parameters()))))
    return said


def freezes_or_adds_in_its_own_way(rank: int, stage: int) -> list[tuple[str, int]]:
    """Train other parameters after wrap(), and other ones on rank 1. Return the errors and the steps."""
    said = []
    for adds in (False, True):
        model = layers()
        optimizer = ballast.wrap(
            torch.optim.SGD([*model[: 1 if adds else 3].parameters()]), model, stage=stage, tuning=ballast.Tuning(timeout=20)
        )
        if adds:
            optimizer.add_param_group({"params": [*model[1 + rank].parameters(), *model[2 - rank].parameters()]})
        else:
            model[1 + rank].weight.requires_grad_(False)
        error = ""
        try:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        except ballast.Error as refused:
            error = str(refused)
        said.append((error, optimizer.steps))
        optimizer.close()
    return said


def discards_on_rank_1(rank: int) -> list[str]:
    """Make a step on rank 0 only, and compute a norm on rank 0 only."""
    said = []
    for use in ("step", "norm"):
        model = layers()
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=ballast.Tuning(timeout=20))
        model(torch.ones(4)).sum().backward()
        try:
            if rank == 1:
                optimizer.zero_grad()
            elif use == "step":
                optimizer.step()
            else:
                optimizer.clip_grad_norm_(1.0)
        except ballast.Error as refused:
            said.append(str(refused))
    return said


class Heard(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("ballast").addHandler(self)
        logging.getLogger("ballast").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def logs_of_own_values(rank: int, stages: list[int]) -> list[list[str]]:
    """Wrap models without and with averages of their own, and a list of optimizers. Return the lines of the log of each."""
    kinds: list[Callable[[int], torch.nn.Module]] = [
        torch.nn.SyncBatchNorm,
        torch.nn.InstanceNorm1d,
        lambda width: torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.BatchNorm2d(width)),
    ]
    heard, found = Heard(), []
    for stage in stages:
        for make in kinds:
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), make(4), torch.nn.Linear(4, 4))
            plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model[0], model[2])]
            for optimizer in ballast.wrap(plain, model, stage=stage):
                optimizer.close()
            found.append(heard.lines)
            heard.lines = []
    ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1)).close()
    return [*found, heard.lines]
