"""Activations of small models, of which every one is offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ballast
import torch
from ballast.tiers import read_activation_options
from ballast.wrap_options import WrapOptions
from python.wrap.support.loops import Loop, Tower

SMALL = {"min_bytes": 1, "in_flight": "2MiB"}


@contextmanager
def offloading_everything() -> Iterator[None]:
    """Let wrap() offload activations of any size inside the block."""
    with patch.object(vars(WrapOptions)["activations"], "read", partial(read_activation_options, **SMALL)):
        yield


def tower_loop(checkpointing: str = "none", **options: Any) -> Loop:
    return Loop(make_model=partial(Tower, checkpointing), micro_steps=2, clip=0.5, steps=3, **options)


def losses_of_a_tower(rank: int, options: dict[str, Any]) -> tuple[list[float], list[torch.Tensor], dict[str, float]]:
    """Train a tower on this rank. Return its losses, its parameters and its figures."""
    with offloading_everything():
        run = tower_loop(rank=rank, ranks=2).run(**options)
    with ballast.gather(run.model):
        return run.losses, [each.tolist() for each in run.parameters], run.optimizer.metrics()


def file_of(directory: Path) -> Path:
    """Return a path of the nameless file that this process has open there."""
    [found] = [each for each in Path("/proc/self/fd").iterdir() if str(each.resolve()).startswith(f"{directory}/")]
    return found
