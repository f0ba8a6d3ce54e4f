"""Tensors that torch holds, of which a checkpoint gets a copy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ballast.wrapper.checkpoint_access import CheckpointAccess as Session


class Writers(Enum):
    """Of a tensor that torch holds."""

    in_turns = 0  # all ranks have the same
    first = 1  # rank 0's counts
    each = 2  # its own stretch


@dataclass
class Held:
    """A tensor of torch's, or a stretch of one."""

    name: str
    role: str
    tensor: torch.Tensor
    writers: Writers = Writers.in_turns
    steps: int = 0  # that have trained a parameter that is frozen now
    begin: int = 0  # element of the whole tensor
    whole: torch.Size | None = None  # its shape, if this is a stretch


def moment_name(parameter: str, moment: str) -> str:
    """
    >>> moment_name("layer.weight", "exp_avg")
    'layer.weight: exp_avg'
    """
    return f"{parameter}: {moment}"


def state_aside(session: Session) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Of parameters that are frozen now."""
    known = ((parameter, session.aside.get(id(parameter))) for _, parameter in session.parameters())
    return [(parameter, values) for parameter, values in known if values]
