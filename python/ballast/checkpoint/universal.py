"""Universal checkpoints of DeepSpeed, as its ds_to_universal writes them: a folder for each parameter."""

from __future__ import annotations

import math
import pickle
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


class StandIn:
    """For classes of DeepSpeed, such as its loss scaler: what they hold is passed over, and nothing of theirs runs."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_without_code(path: Path) -> Any:
    """What torch.save() wrote. Tensors are read when they are used."""
    classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    with torch.serialization.safe_globals([(StandIn, name) for name in classes]):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class Universal:
    may_be_flat = True  # in stage 3

    def __init__(self, directory: Path):
        self._directory = directory
        self._folder = directory / "zero"

    def shape(self, name: str, moment: str = "") -> tuple[int, ...] | None:
        if not self._path(name, moment).exists():
            return None
        found = tuple(self._tensor(name, moment).shape)
        whole = self._shapes.get(name, found)
        return whole if len(found) == 1 and math.prod(whole) == found[0] else found

    def has_state(self, name: str) -> bool:
        return any(file.stem != "fp32" for file in (self._folder / name).glob("*.pt"))

    def parameter(self, name: str) -> torch.Tensor:
        return self._tensor(name, "")

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self._tensor(name, moment)

    def steps(self, name: str) -> int | None:
        path = self._path(name, "step")
        return int(load_without_code(path)) if path.exists() else self._steps_of_all

    @cached_property
    def _steps_of_all(self) -> int | None:
        """Stage 3 keeps no steps of parameters: all have made as many as the optimizer's first."""
        path = self._folder / "optimizer_state.pt"
        if not path.exists():
            return None
        found = load_without_code(path)
        states = found.get("optimizer_state_dict", {}).get("state", {}).values()
        counts = [int(state["step"]) for state in states if "step" in state]
        if counts:
            return counts[0]
        # A FusedAdam of long ago counted in its groups; today's leaves a 0 there, whatever was done.
        return max((int(group.get("step", 0)) for group in found.get("param_groups", [])), default=0) or None

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Stage 3 writes flat tensors: their shapes are in the ranks' own files, which lie beside."""
        files = sorted(self._directory.glob("*model_states.pt"))
        try:
            groups = load_without_code(files[0]).get("param_shapes") if files else None
        except pickle.UnpicklingError:  # they hold what the script has put there too
            groups = None
        return {name: tuple(shape) for group in groups or [] for name, shape in group.items()}

    def _path(self, name: str, what: str) -> Path:
        return self._folder / name / f"{what or 'fp32'}.pt"

    def _tensor(self, name: str, moment: str) -> torch.Tensor:
        found = load_without_code(self._path(name, moment))
        tensor: torch.Tensor = found["param"] if isinstance(found, dict) else found
        return tensor
