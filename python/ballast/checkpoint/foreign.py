"""Recognise checkpoints of other programs by the names of their files, and choose the reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.checkpoint.distributed import content_of
from ballast.checkpoint.keyed import Keyed, of_only_model
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.plain_torch import plain_torch, plain_torch_alone
from ballast.checkpoint.source import Source
from ballast.checkpoint.universal import Universal
from ballast.checkpoint.zero import Zero
from ballast.checkpoint.zero_files import STAGE_0, folder_of, is_sharded
from ballast.checks import refuse


@dataclass(frozen=True)
class Names:
    """What a reader may know of the model and its optimizer, which a checkpoint may have under any keys."""

    trained: Sequence[str]  # the names that the checkpoint must have
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors of the model
    groups: Sequence[Sequence[str]] | None = None  # the names in each group of the live optimizer


def source_of(path: Path, names: Names | None = None) -> Source:
    """Return the reader of a checkpoint of another program. Without `names`, it must hold one model."""
    kind, shapes = kind_of(path), None if names is None else names.shapes
    if kind == "deepspeed":
        folder = folder_of(path)
        if kind_of(folder) == "universal":
            return Universal(folder, shapes)
        if is_sharded(folder):
            return Zero(folder, shapes or {})
        return _of_torch(folder / STAGE_0, names)  # the file of torch.save() with the model
    if kind == "universal":
        return Universal(path, shapes)
    if kind == "distributed":
        content = content_of(path)
        return of_only_model(content) if names is None else Keyed(content, names.trained, names.shapes)
    if kind == "torch":
        return _of_torch(path, names)
    if kind == "safetensors":
        refuse(
            "cannot load a training from safetensors files: they hold no optimizer state",
            where=str(path),
            needed="a checkpoint with the optimizer's state, such as the folder with an optimizer.pt too",
            remedy="ballast.load(model, files) reads parameters.",
        )
    raise AssertionError(kind)


def _of_torch(path: Path, names: Names | None) -> Keyed:
    return plain_torch_alone(path) if names is None else plain_torch(path, names.trained, names.shapes, names.groups)
