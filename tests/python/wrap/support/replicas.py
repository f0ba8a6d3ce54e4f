"""Trainings with several copies of the parameters, for the tests of test_replicas.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.loops import Loop, adapted, mlp, only_trained

Values = list[torch.Tensor]


def loop_of(rank: int, **changes: Any) -> Loop:
    return Loop(rank=rank, ranks=dist.get_world_size(), **changes)


def values_of(run: Any) -> Values:
    with ballast.gather(run.model):
        return [parameter.detach().clone() for parameter in run.model.parameters()]


def saved_and_loaded(rank: int, folder: str) -> list[tuple[Values, Values]]:
    """Save with copies and load without them, and the other way round. Return the values before and after."""
    configurations: list[dict[str, Any]] = [{"stage": 3}, {"stage": 3, "replicas": 2}]
    pairs = []
    for number, (saving, loading) in enumerate(zip(configurations, reversed(configurations))):
        saved = loop_of(rank).run(**saving)
        directory = Path(folder) / str(number)
        ballast.save(directory, saved.model, saved.optimizer)
        loaded = loop_of(rank, steps=1).run(**loading)
        ballast.load_checkpoint(directory, loaded.model, loaded.optimizer)
        pairs.append((values_of(saved), values_of(loaded)))
    return pairs


def written_in_gather(rank: int) -> tuple[Values, Values]:
    """Return values that were written in gather(), and those that calls of the modules use afterwards."""
    run = loop_of(rank).run(stage=3, replicas=2)
    with ballast.gather(run.model), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(3)
        written = [parameter.detach().clone() for parameter in run.model.parameters()]
    used: Values = []
    for module in run.model:
        module.register_forward_hook(lambda module, *_: used.extend(each.detach().clone() for each in module.parameters()))
    with torch.no_grad():
        run.model(torch.ones(20))
    return written, used


def with_frozen_parameters(rank: int, configurations: list[dict[str, Any]]) -> list[Values]:
    loop = loop_of(rank, make_model=adapted, make_optimizer=only_trained)
    return [values_of(loop.run(**options)) for options in configurations]


def kept_bytes(rank: int) -> list[tuple[float, float]]:
    """Return the bytes of parameters, and all bytes, without copies and with two."""
    bytes_of = []
    for copies in (None, 2):
        run = loop_of(rank, make_model=lambda: mlp(256)).run(stage=3, replicas=copies)
        memory = run.optimizer.metrics()
        bytes_of.append(memory["memory_bytes/device"])
    return [(bytes_of[0], bytes_of[1])]


def refusals(rank: int) -> list[str]:
    errors = []
    for options in ({"replicas": 3}, {"replicas": 4}, {"replicas": "host", "stage": 2}):
        try:
            loop_of(rank).run(**{"stage": 3, **options})
        except ballast.UsageError as error:
            errors.append(str(error))
    return errors
