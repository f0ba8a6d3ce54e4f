"""Write a directory of torch.distributed.checkpoint from a checkpoint, one tensor at a time: the weights and, of a
checkpoint of Ballast, the optimizer's state. It has the keys of torch's get_state_dict()."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from ballast.checkpoint import manifest
from ballast.checkpoint.contents import Checkpoint
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.weights import state_in
from ballast.checks import refuse
from ballast.new_files import require_no_link
from ballast.torch.parameters.stored_tensors import StoredTensor

MODEL, OPTIMIZER = "model", "optim"


class ReadLater(dcp.DefaultSavePlanner):  # type: ignore[misc]  # torch does not say its type
    """Plans with tensors on the meta device, and reads each when torch writes it."""

    def __init__(self, stored: Mapping[str, StoredTensor]):
        super().__init__()
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        stored = self._stored.get(index.fqn)
        return super().lookup_object(index) if stored is None else stored.read_all()


def write_distributed(checkpoint: Path, folder: Path, weights: Mapping[str, StoredTensor]) -> None:
    """Write the weights, and the optimizer's state if the checkpoint is one of Ballast."""
    for path in folder.glob("*"):
        require_no_link(path)  # torch would follow it
    stored = {f"{MODEL}.{name}": tensor for name, tensor in weights.items()}
    content: dict[str, Any] = {MODEL: {name: _planned(tensor) for name, tensor in weights.items()}}
    if kind_of(checkpoint) == "ballast":
        saved = manifest.read(checkpoint)
        if saved.converted_from:
            refuse(
                "cannot export a converted checkpoint to torch.distributed.checkpoint: it has no parameter groups",
                where=str(checkpoint),
                needed="a checkpoint of ballast.save(), for the options of the optimizer",
                remedy="Load it with ballast.load_checkpoint(), save with ballast.save(), and export that.",
            )
        state = state_in(checkpoint, saved)
        content[OPTIMIZER] = _of_optimizer(saved, state)
        for name, values in state.items():
            stored.update({f"{OPTIMIZER}.state.{name}.{key}": value for key, value in values.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), planner=ReadLater(stored), no_dist=True)


def _of_optimizer(saved: Checkpoint, state: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, Any]:
    own_steps = {name for each in saved.optimizers if each.own_step for name in each.parameters}
    of_all: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        of_all[name] = {key: _planned(value) for key, value in values.items()}
        if name not in own_steps:
            of_all[name]["step"] = torch.tensor(float(saved.tensors[name].steps), device="cpu")
    groups = [{"params": group["parameters"], **group["options"]} for each in saved.optimizers for group in each.groups]
    return {"state": of_all, "param_groups": groups}


def _planned(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
