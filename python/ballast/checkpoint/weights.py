"""The parameters and buffers in checkpoints of any kind, as stored tensors that are read piece by piece."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.contents import Checkpoint, Tensor
from ballast.checkpoint.distributed import Distributed, entries_of_only_model, read_entry
from ballast.checkpoint.foreign import refuse_deepspeed
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.pieces import Piece, cover
from ballast.checkpoint.schema import MOMENTS
from ballast.checkpoint.stream import Stream
from ballast.checkpoint.universal import Universal
from ballast.checkpoint.unpickling import fail_unreadable
from ballast.wrapper.memory import tensor_at
from ballast.wrapper.safetensors_reader import Files, tensors_in
from ballast.wrapper.stored_tensor import StoredTensor
from ballast.wrapper.unwrap import named_buffers, named_parameters


@dataclass(frozen=True)
class Weights:
    """The tensors of a model in a checkpoint."""

    tensors: Mapping[str, StoredTensor]
    of_training: bool = True  # it may be cast to the model's formats, because it holds the masters of a training
    trained_only: bool = False  # frozen parameters and buffers are not in it


class Latest:
    """Keeps what was read last, because the pieces of a tensor are read one after the other."""

    def __init__(self) -> None:
        self._key: object = None
        self._values = torch.empty(0, device="cpu")

    def get(self, key: object, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._key != key:
            self._key, self._values = None, torch.empty(0, device="cpu")  # free the last one before the next is read
            self._values = read()
            self._key = key
        return self._values


@dataclass(frozen=True)
class Whole:
    """How to read a tensor that its file gives only as a whole."""

    name: str
    read: Callable[[], torch.Tensor]
    latest: Latest  # of the checkpoint


class WholeTensor(StoredTensor):
    """A tensor that its file gives only as a whole."""

    def __init__(self, whole: Whole, dtype: torch.dtype, shape: tuple[int, ...], where: Path):
        super().__init__(dtype, shape, str(where))
        self._whole = whole

    def read(self, first: int, count: int, into: int) -> None:
        values = self._whole.latest.get(self._whole.name, self._flat)
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(values[first : first + count])

    def _flat(self) -> torch.Tensor:
        values = self._whole.read().reshape(-1)
        if values.numel() != self.elements:
            fail_unreadable(Path(self.where), f"{self._whole.name} has {values.numel()} elements, and not {self.shape}")
        return values


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
    """Return the weights in a checkpoint of Ballast, torch.distributed.checkpoint or DeepSpeed (universal), or in
    safetensors files. Reads no values. A model says which of several sets of weights is meant."""
    directory = Path(files) if isinstance(files, (str, os.PathLike)) else None
    kind = kind_of(directory) if directory is not None and directory.is_dir() else ""
    if directory is None or kind in ("", "safetensors"):
        return Weights(tensors_in(files), of_training=False)
    if kind == "deepspeed":
        refuse_deepspeed(directory)
    if kind == "universal":
        return Weights(_of_universal(directory, model), trained_only=True)
    return Weights(_of_ballast(directory) if kind == "ballast" else _of_distributed(directory, model))


def _of_ballast(directory: Path) -> dict[str, StoredTensor]:
    checkpoint = manifest.read(directory)
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


def _of_distributed(directory: Path, model: torch.nn.Module | None) -> dict[str, StoredTensor]:
    if model is None:
        found = entries_of_only_model(directory)
    else:
        known = {name for name, _ in (*named_parameters(model), *named_buffers(model))}
        found = Distributed(directory, [name for name, _ in named_parameters(model)], known).entries_like(known)
    latest = Latest()
    return {
        name: WholeTensor(Whole(name, partial(read_entry, entry), latest), entry.dtype, entry.shape, directory)
        for name, entry in found.items()
    }


def _of_universal(directory: Path, model: torch.nn.Module | None) -> dict[str, StoredTensor]:
    source, latest = Universal(directory), Latest()
    shapes = {} if model is None else {name: tuple(each.shape) for name, each in named_parameters(model)}
    found: dict[str, StoredTensor] = {}
    for name in source.names():
        values, shape = source.parameter(name), source.shape(name) or ()
        if source.may_be_flattened(name) and math.prod(shapes.get(name, (-1,))) == values.numel():
            shape = shapes[name]
        whole = Whole(name, partial(source.parameter, name), latest)
        found[name] = WholeTensor(whole, values.dtype, shape, directory)
    return found
