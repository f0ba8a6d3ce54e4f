"""Read universal checkpoints of DeepSpeed, as its ds_to_universal writes them: one folder for each parameter."""

from __future__ import annotations

import logging
import math
from functools import cached_property
from pathlib import Path

import torch

from ballast.checkpoint.unpickling import fail_unreadable, load_without_code, number_in, require_plain
from ballast.errors import Error

log = logging.getLogger("ballast")

# Classes whose objects are passed over: DeepSpeed's own in the files of a parameter, and any class in files that hold the
# script's objects too.
ITS_OWN = ("deepspeed.",)
ANY = ("",)


class Universal:
    """A Source for one directory."""

    may_be_flat = True  # stage 3 writes flat tensors

    def __init__(self, directory: Path):
        self._directory = directory
        self._folder = directory / "zero"

    def shape(self, name: str, moment: str = "") -> tuple[int, ...] | None:
        if not self._path(name, moment).exists():
            return None
        found = tuple(self._tensor(name, moment).shape)
        full = self._shapes.get(name, found)
        return full if len(found) == 1 and math.prod(full) == found[0] else found

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in self._folder.glob("*/fp32.pt"))

    def may_be_flattened(self, name: str) -> bool:
        """Return whether the parameter is flat here, and no file says which shape it has."""
        return len(self._tensor(name, "").shape) == 1 and name not in self._shapes

    def has_state(self, name: str) -> bool:
        return any(file.stem != "fp32" for file in (self._folder / name).glob("*.pt"))

    def parameter(self, name: str) -> torch.Tensor:
        return self._tensor(name, "")

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self._tensor(name, moment)

    def steps(self, name: str) -> int | None:
        path = self._path(name, "step")
        if not path.exists():
            return self._steps_of_all
        return number_in(load_without_code(path, path, ITS_OWN), path)

    @cached_property
    def _steps_of_all(self) -> int | None:
        """Return the steps of the optimizer's first parameter. Stage 3 stores no steps of single parameters: all have
        the same."""
        path = self._folder / "optimizer_state.pt"
        if not path.exists():
            return None
        found = load_without_code(path, path, ANY)
        try:
            states = found.get("optimizer_state_dict", {}).get("state", {}).values()
            counts = [number_in(state["step"], path) for state in states if "step" in state]
            # Older versions of FusedAdam count in the groups. Newer ones always leave a 0 there.
            of_groups = [number_in(group.get("step", 0), path) for group in found.get("param_groups", [])]
        except (AttributeError, TypeError, KeyError):
            fail_unreadable(path, "it does not hold the state_dict() of an optimizer")
        return counts[0] if counts else max(of_groups, default=0) or None

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of stage 3's flat tensors, from the ranks' files next to them."""
        files = sorted(self._directory.glob("*model_states.pt"))
        try:
            groups = load_without_code(files[0], files[0], ANY).get("param_shapes") if files else None
            return {name: tuple(int(size) for size in shape) for group in groups or [] for name, shape in group.items()}
        except (Error, AttributeError, TypeError, ValueError) as error:  # the script's own objects are in these files too
            log.info("shapes of flat tensors are not compared: %s", error)
            return {}

    def _path(self, name: str, what: str) -> Path:
        return self._folder / name / f"{what or 'fp32'}.pt"

    def _tensor(self, name: str, moment: str) -> torch.Tensor:
        path = self._path(name, moment)
        found = load_without_code(path, path, ITS_OWN)
        return require_plain(found.get("param") if isinstance(found, dict) else found, path)
