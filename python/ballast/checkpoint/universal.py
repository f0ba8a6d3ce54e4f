"""Read universal checkpoints of DeepSpeed, as its ds_to_universal writes them: one folder for each parameter."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ballast.checkpoint.source import STEP, Latest, WholeTensor
from ballast.checkpoint.unpickling import fail_unreadable, load_without_code, number_in, require_plain
from ballast.errors import Error
from ballast.torch.parameters.stored_tensors import StoredTensor

log = logging.getLogger("ballast")

# Classes whose objects are passed over: DeepSpeed's own in the files of a parameter, and any class in files that hold the
# script's objects too.
ITS_OWN = ("deepspeed.",)
ANY = ("",)


class Universal:
    """A Source for one directory. `shapes` are those of a model, for tensors that are flat and have no shape elsewhere."""

    may_be_flat = True  # stage 3 writes flat tensors
    trained_only = True
    of_training = True

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]] | None = None):
        self._directory = directory
        self._folder = directory / "zero"
        self._shapes_of_model = shapes or {}
        self._latest: dict[str, Latest] = defaultdict(Latest)

    def names(self) -> list[str]:
        return sorted(str(path.parent.relative_to(self._folder)) for path in self._folder.glob("*/fp32.pt"))

    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        path = self._folder / name / f"{moment or 'fp32'}.pt"
        if not path.exists():
            return None
        found = self._read(path)
        shape = self._shape_of(name, tuple(found.shape))
        return WholeTensor(partial(self._read, path), found.dtype, shape, path, self._latest[moment])

    def state(self, name: str) -> Collection[str]:
        kept = {file.stem for file in (self._folder / name).glob("*.pt")} - {"fp32"}
        return kept | ({STEP} if kept and self._steps_of_all is not None else set())

    def steps(self, name: str) -> int | None:
        path = self._folder / name / f"{STEP}.pt"
        if not path.exists():
            return self._steps_of_all
        return number_in(load_without_code(path, path, ITS_OWN), path)

    def options(self, name: str) -> Mapping[str, Any]:
        return {}  # DeepSpeed's groups have other parameters than the script's

    def extra(self) -> Any:
        return None

    @cached_property
    def _steps_of_all(self) -> int | None:
        """Return the steps of the optimizer's first parameter. Stage 3 stores no steps of single parameters: all have
        the same."""
        path = self._folder / "optimizer_state.pt"
        if not path.exists():
            return None
        found = load_without_code(path, path, ANY)
        try:
            return steps_of(found.get("optimizer_state_dict", {}), path)
        except (AttributeError, TypeError, KeyError):
            fail_unreadable(path, "it does not hold the state_dict() of an optimizer")

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

    def _shape_of(self, name: str, found: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor that may be flat in its file."""
        full = self._shapes.get(name) or self._shapes_of_model.get(name, found)
        return full if len(found) == 1 and math.prod(full) == found[0] else found

    def _read(self, path: Path) -> torch.Tensor:
        found = load_without_code(path, path, ITS_OWN)
        return require_plain(found.get("param") if isinstance(found, dict) else found, path)


def steps_of(optimizer: Mapping[str, Any], path: Path) -> int | None:
    """Return the steps in the state_dict() of an optimizer whose parameters all have the same."""
    counts = [number_in(state[STEP], path) for state in optimizer.get("state", {}).values() if STEP in state]
    # Older versions of FusedAdam count in the groups. Newer ones always leave a 0 there.
    of_groups = [number_in(group.get(STEP, 0), path) for group in optimizer.get("param_groups", [])]
    return counts[0] if counts else max(of_groups, default=0) or None
