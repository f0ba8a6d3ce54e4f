"""The parameters and buffers in checkpoints of any kind, as stored tensors that are read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.contents import Checkpoint, Tensor
from ballast.checkpoint.foreign import Names, source_of
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.pieces import Piece, cover
from ballast.checkpoint.schema import MOMENTS
from ballast.checkpoint.source import Latest
from ballast.checkpoint.stream import Stream
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.stored_tensors import Files, StoredTensor, tensors_in
from ballast.torch.tensor_names import named_buffers, named_parameters


@dataclass(frozen=True)
class Weights:
    """The tensors of a model in a checkpoint."""

    tensors: Mapping[str, StoredTensor]
    of_training: bool = True  # it may be cast to the model's formats, because it holds the masters of a training
    trained_only: bool = False  # frozen parameters and buffers are not in it


class CheckpointTensor(StoredTensor):
    """A parameter or a buffer in a checkpoint of Ballast. Each chunk is read as a whole, and compared with its checksum."""

    def __init__(self, name: str, entry: Tensor, files: Sequence[str], latest: Latest, dtype: torch.dtype | None = None):
        own: torch.dtype = getattr(torch, entry.dtype)
        super().__init__(own if dtype is None else dtype, tuple(entry.shape), str(Path(files[0]).parent))
        self._name, self._entry, self._files, self._latest = name, entry, files, latest

    def in_format(self, dtype: torch.dtype) -> StoredTensor:
        """Return the tensor in another format; in fp32 with the bits of a trained parameter's master."""
        if self._entry.role == "trained" and dtype is torch.float32:
            return CheckpointTensor(self._name, self._entry, self._files, self._latest, dtype)
        return super().in_format(dtype)

    def read(self, first: int, count: int, into: int) -> None:
        for cut in cover(self._entry.pieces, first, count):
            values = self._latest.get(self._key_of(cut.piece), partial(self._values_of, cut.piece))
            place = tensor_at(into + cut.into * self.dtype.itemsize, cut.count, self.dtype)
            place.copy_(values[cut.first : cut.first + cut.count])

    def _key_of(self, piece: Piece) -> object:
        return self._name, self.dtype, piece.first

    def _reader_at(self, piece: Piece) -> _core.CheckpointReader:
        alone = replace(piece, file=0)
        return Stream([self._files[piece.file]], [alone]).go_to(alone, self._name)

    def _values_of(self, piece: Piece) -> torch.Tensor:
        values, reader = torch.empty(piece.count, dtype=self.dtype, device="cpu"), self._reader_at(piece)
        if str(self.dtype) == f"torch.{self._entry.dtype}":  # the parameter comes first in a chunk
            values.copy_(torch.frombuffer(reader.memory(), dtype=self.dtype, count=piece.count))
        else:
            part = _core.StatePart(dtype=_core.DType.fp32, parameter=values.data_ptr(), count=piece.count)
            reader.copy(self._entry.kind(), (piece.count, 0, 0, piece.count), part)
        return values


class MomentTensor(CheckpointTensor):
    """A moment of a trained parameter, in fp32."""

    def __init__(self, kind: str, name: str, entry: Tensor, files: Sequence[str], latest: Latest):
        super().__init__(name, entry, files, latest, torch.float32)
        self._kind = kind  # "momentum" or "variance"

    def _key_of(self, piece: Piece) -> object:
        return self._kind, super()._key_of(piece)

    def _values_of(self, piece: Piece) -> torch.Tensor:
        part = {kind: torch.zeros(piece.count, dtype=torch.float32, device="cpu") for kind in ("parameter", *MOMENTS)}
        at = {kind: values.data_ptr() for kind, values in part.items()}
        to = _core.StatePart(dtype=_core.DType.fp32, count=piece.count, **at)
        self._reader_at(piece).copy(self._entry.kind(), (piece.count, 0, 0, piece.count), to)
        return part[self._kind]


def weights_in(files: Files, model: torch.nn.Module | None = None) -> Weights:
    """Return the weights in a checkpoint of any kind, or in files of safetensors or torch.save(). Reads no values. A model says
    which of several sets of weights is meant."""
    path = Path(files) if isinstance(files, (str, os.PathLike)) else None
    kind = kind_of(path) if path is not None else ""
    if path is None or kind in ("", "safetensors"):
        return Weights(tensors_in(files), of_training=False)
    if kind == "ballast":
        checkpoint = manifest.read(path)
        return Weights(_of_ballast(path, checkpoint), trained_only=bool(checkpoint.converted_from))
    source = source_of(path, None if model is None else _names_in(model))
    found = {name: stored for name in source.names() if (stored := source.tensor(name)) is not None}
    return Weights(found, of_training=source.of_training, trained_only=source.trained_only)


def _names_in(model: torch.nn.Module) -> Names:
    parameters = {name: tuple(each.shape) for name, each in named_parameters(model)}
    return Names([*parameters], {**parameters, **{name: tuple(each.shape) for name, each in named_buffers(model)}})


def _of_ballast(directory: Path, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    files, latest = manifest.data_files(directory, checkpoint), Latest()
    return {
        name: CheckpointTensor(name, entry, files, latest)
        for name, entry in checkpoint.tensors.items()
        if entry.is_parameter() or entry.role == "buffer"
    }


def state_in(directory: Path, checkpoint: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
    """Return what the optimizer keeps in a checkpoint of Ballast, by parameter and by torch's name. Reads no values."""
    files, latest = manifest.data_files(directory, checkpoint), Latest()
    moments = {name: saved.moments for saved in checkpoint.optimizers for name in saved.parameters}
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, entry in checkpoint.tensors.items():
        parameter, colon, key = name.rpartition(": ")
        if entry.role == "trained":
            kept = {"momentum": entry.momentum, "variance": entry.variance}
            for kind, of_torch in moments.get(name, {}).items():
                if kept[kind]:
                    found.setdefault(name, {})[of_torch] = MomentTensor(kind, name, entry, files, latest)
        elif colon and not entry.is_parameter() and entry.role != "buffer":
            found.setdefault(parameter, {})[key] = CheckpointTensor(name, entry, files, latest)
    return found
