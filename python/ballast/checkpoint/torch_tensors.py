"""Tensors that torch holds outside of the sharded state. A checkpoint gets a copy of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ballast.torch.training.checkpoint_access import CheckpointAccess
from ballast.torch.updates.shown_state import LazyState


class Writers(Enum):
    """Which ranks write a tensor that torch holds."""

    in_turns = 0  # all ranks hold the same values, so they share the work
    first = 1  # rank 0, whose values are saved
    each = 2  # every rank writes its local shard


@dataclass
class TorchTensor:
    """A tensor that torch holds, or a shard of one."""

    name: str
    role: str
    tensor: torch.Tensor
    writers: Writers = Writers.in_turns
    steps: int = 0  # that have trained a parameter that is frozen now
    begin: int = 0  # first element of the shard in the full tensor
    full_shape: torch.Size | None = None  # of the full tensor, if this is a shard

    def read(self) -> torch.Tensor:
        """Return the tensor, read from the library's memory if that has it."""
        return self.tensor.read_now() if isinstance(self.tensor, LazyState) else self.tensor


def moment_name(parameter: str, moment: str) -> str:
    """Return the name of a moment in a checkpoint.

    >>> moment_name("layer.weight", "exp_avg")
    'layer.weight: exp_avg'
    """
    return f"{parameter}: {moment}"


def frozen_state(access: CheckpointAccess) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Return the optimizer state of the parameters that are frozen now."""
    known = ((parameter, access.frozen_state.get(id(parameter))) for _, parameter in access.parameters())
    return [(parameter, values) for parameter, values in known if values]
