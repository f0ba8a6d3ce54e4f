"""Checkpoints that other programs wrote as those of Ballast: a map of their tensors, and a reader of their files."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.checkpoint.deepspeed import STAGE_0, Universal, Zero, folder_of, is_sharded
from ballast.checkpoint.distributed import content_of
from ballast.checkpoint.kinds import FOREIGN, kind_of
from ballast.checkpoint.manifest import Checkpoint, Place, Reader
from ballast.checkpoint.runs import recorded
from ballast.checkpoint.sources import Keyed, Source, content_of_files, only_model_in, plain_torch_alone, steps_made
from ballast.checkpoint.tensors import buffers_by_name, parameter_names, parameters_by_name, saved_tensor, state_part
from ballast.checkpoint.torch_file import StandIn
from ballast.checks import refuse
from ballast.torch.memory import BYTES
from ballast.torch.parameters.stored_tensors import Latest, StoredTensor
from ballast.torch.parts import full_shape
from ballast.torch.training.training import Training
from ballast.torch.updates.rules import is_same

log = logging.getLogger("ballast")


@dataclass(frozen=True)
class Names:
    """What a reader may know of the model and its optimizer, which a checkpoint may have under any keys."""

    trained: Sequence[str]  # the names that the checkpoint must have
    shapes: Mapping[str, tuple[int, ...]]  # all tensors of the model
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
        return _torch_source(folder / STAGE_0, names)  # the file of torch.save() with the model
    if kind == "universal":
        return Universal(path, shapes)
    if kind == "distributed":
        content = content_of(path)
        return only_model_in(content) if names is None else Keyed(content, names.trained, names.shapes)
    if kind == "torch":
        return _torch_source(path, names)
    if kind == "safetensors":
        refuse(
            "cannot load a training from safetensors files: they hold no optimizer state",
            where=str(path),
            needed="a checkpoint with the optimizer's state, such as the folder with an optimizer.pt too",
            remedy="ballast.load(model, files) reads parameters.",
        )
    raise AssertionError(kind)


def _torch_source(path: Path, names: Names | None) -> Keyed:
    if names is None:
        return plain_torch_alone(path)
    return Keyed(content_of_files(path), names.trained, names.shapes, names.groups)


class SourceReader:
    """Reads elements of a source's tensors, as a PieceReader does of a checkpoint."""

    def __init__(self, source: Source, moments: Mapping[str, str]):
        self._source, self._moments = source, moments
        self._latest = Latest()  # the shards of a parameter come one after the other

    def copy(self, name: str, tensor: _core.SavedTensor, first: int, into: _core.StatePart) -> None:
        """Copy elements with their state, or the parameter alone. A part of bytes gets them as they are."""
        stored = self._latest.get(name, partial(self._stored, name, tensor))
        if into.is_bytes:
            values = stored["parameter"].read_part(first, into.count // tensor.item_bytes).view(BYTES)
            return into.copy_from(_core.StatePart(dtype=_core.DType.u8, parameter=values.data_ptr(), count=into.count))
        shard = {kind: each.read_part(first, into.count).to(torch.float32) for kind, each in stored.items()}
        into.copy_from(state_part(shard))

    def copy_elements(self, name: str, tensor: _core.SavedTensor, elements: tuple[int, int], into: int) -> None:
        """Copy elements without state, as they are."""
        self._latest.get(name, partial(self._stored, name, tensor))["parameter"].read(*elements, into)

    def _stored(self, name: str, tensor: _core.SavedTensor) -> dict[str, StoredTensor]:
        moments = {} if tensor.kind is None else self._moments
        found = {kind: self._source.tensor(name, moment) for kind, moment in {"parameter": "", **moments}.items()}
        return {kind: stored for kind, stored in found.items() if stored is not None}


class ForeignCheckpoint(Checkpoint):
    """A source as a checkpoint. Its masters and moments are in fp32."""

    def __init__(self, saved: _core.SavedCheckpoint, source: Source):
        super().__init__(saved, "")
        self._source = source

    def reader(self, wanted: Sequence[_core.Piece] = ()) -> Reader:
        return SourceReader(self._source, self.optimizers[0].moments)


def as_checkpoint(
    source: Source, kind: str, moments: dict[str, str], shapes: Mapping[str, tuple[int, ...] | None], trained: Collection[str]
) -> ForeignCheckpoint:
    """Return a source as a checkpoint of these tensors, as far as it has them. `moments` are torch's names, by the library's,
    of those that the `trained` ones have; `shapes` are those in the model, if there is one."""
    tensors: dict[str, _core.SavedTensor] = {}
    for name, shape in shapes.items():
        stored = source.tensor(name)
        if stored is not None:
            own = stored.shape if shape is None or not _is_flat(source, stored, shape) else shape
            tensors[name] = saved_tensor("frozen", stored.dtype, own)
            if name in trained:
                tensors[name] = _trained(source, name, own, moments, own if shape is None else shape)
    steps = max((each.steps for each in tensors.values()), default=0)
    saved = _core.SavedOptimizer(step=steps, optimizer="another program's optimizer", moments=moments, groups=[])
    found = _core.SavedCheckpoint(folder="", ranks=1, optimizers=[saved], tensors=tensors, converted_from=FOREIGN[kind])
    return ForeignCheckpoint(found, source)


def _is_flat(source: Source, stored: StoredTensor, shape: tuple[int, ...]) -> bool:
    return source.may_be_flat and stored.shape == (math.prod(shape),)


def _trained(
    source: Source, name: str, shape: tuple[int, ...], moments: Mapping[str, str], of_moments: tuple[int, ...]
) -> _core.SavedTensor:
    """Describe a tensor with its state. One without is a frozen parameter or a buffer; which of them, the model knows."""
    for moment in moments.values():
        kept = source.tensor(name, moment)
        if kept is None:
            refuse(f"the checkpoint lacks the optimizer's {moment}", where=name, needed="one for each parameter with state")
        if kept.shape != of_moments and not _is_flat(source, kept, of_moments):
            refuse(f"the checkpoint holds {moment} of shape {kept.shape}", where=name, needed=f"{of_moments}")
    return trained_in_fp32(shape, moments, steps_made(source, name, needed="variance" in moments))


def trained_in_fp32(shape: Sequence[int], moments: Collection[str], steps: int) -> _core.SavedTensor:
    has = {kind: kind in moments for kind in ("momentum", "variance")}
    kind = _core.ChunkKind(parameter=_core.DType.fp32, format=_core.StateFormat.fp32, **has)
    return saved_tensor("trained", torch.float32, shape, kind=kind, steps=steps)


class ForeignPlace(Place):
    """Another program's checkpoint, for a model and its optimizer."""

    path: Path

    def __init__(self, path: Path, model: torch.nn.Module, access: Training):
        self.path = path
        self._model, self._access = model, access

    def read_text(self) -> bytes:
        return b""

    def read_indexes(self, text: bytes, rank: int, ranks: int) -> list[bytes]:
        return []

    def parse(self, text: bytes, indexes: Sequence[bytes], rank: int) -> Checkpoint:
        access = self._access
        if access.has_custom_step:
            refuse(
                f"cannot load another program's checkpoint into {type(access.optimizer).__name__}: its step is its own",
                needed="an optimizer that the library has a rule for, such as AdamW",
            )
        if kind_of(self.path) == "run":
            return recorded(self.path)
        names = parameter_names(self._model, [access])
        trained = [names[id(each)] for _, each in access.parameters() if each.requires_grad]
        known = {**parameters_by_name(self._model, [access]), **buffers_by_name(self._model)}
        shapes = {name: tuple(full_shape(each)) for name, each in known.items()}
        groups = [[names[id(each)] for each in group["params"]] for group in access.optimizer.param_groups]
        source = source_of(self.path, Names(trained, shapes, groups))
        moments = {kind.name: name for kind, name in access.names_of_moments()}
        without = self._without_state(source, trained, moments)
        with_state = [name for name in trained if name not in without]
        found = as_checkpoint(source, kind_of(self.path), moments, shapes, with_state)
        found.options = [self._options(source, groups)]
        found.extra = source.extra()
        return found

    def _without_state(self, source: Source, trained: Sequence[str], moments: Mapping[str, str]) -> Collection[str]:
        """Return the parameters without optimizer state: torch has none for a parameter that never got a gradient. If
        all of them lack it, the state itself is missing."""
        without = [name for name in trained if not source.state(name)] if moments else []
        if len(without) == len(trained):
            return ()
        self._warn("the optimizer state of these parameters begins at zero, because the checkpoint has none: %s", without)
        return without

    def _options(self, source: Source, groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return the options that the checkpoint has for each group of the optimizer, where its parameters agree on them."""
        saved = []
        for number, names in enumerate(groups):
            found = [options for name in names if (options := source.options(name))]
            differ = {key for options in found for key in options if not is_same(options[key], found[0].get(key))}
            self._warn(f"param_groups[{number}] keeps options that its parameters disagree on in the checkpoint: %s", [*differ])
            options = found[0] if found else {}
            saved.append({k: v for k, v in options.items() if k not in differ and not isinstance(v, StandIn)})
        return saved

    def _warn(self, words: str, names: list[str]) -> None:
        if names and self._access.group.rank == 0:
            log.warning(words, ", ".join(sorted(names)))
