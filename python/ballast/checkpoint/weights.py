"""Find the parameters and buffers in checkpoints of any kind, and load them into a model piece by piece."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from ballast._torch_compat import without_modes
from ballast.checkpoint.foreign import Names, source_of
from ballast.checkpoint.hub_names import converted
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.loading import read_together, use_current
from ballast.checkpoint.manifest import PARAMETERS, Checkpoint, LocalCheckpoint, Place, Reader, outlined, parameters_of
from ballast.checkpoint.remote import Remote, RemoteCheckpoint, is_address, newest
from ballast.checkpoint.runs import recorded
from ballast.checkpoint.tensors import LOADING, buffers_by_name, read_state, warn_of_left
from ballast.checks import fail, refuse
from ballast.ranks import Agreement, Group
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.deferred_init import read_later
from ballast.torch.parameters.deferred_parameters import begin_with_file, device_of, replace_buffers, require_expected
from ballast.torch.parameters.managed_parameter import by_owner, is_on_meta
from ballast.torch.parameters.stored_tensors import Files, StoredTensor, stored_part, tensors_in
from ballast.torch.parameters.units import named_buffers, named_parameters, names_in_model, unwrapped, unwrapped_name
from ballast.torch.parts import full_shape, local_tensor
from ballast.torch.process_groups import rank_in_job

Match = tuple[torch.Tensor, StoredTensor, str]  # a tensor of the model, where it is stored, and its name there


@dataclass(frozen=True)
class Weights:
    """The tensors of a model in a checkpoint."""

    tensors: Mapping[str, StoredTensor]
    has_masters: bool = True  # it may be cast to the model's formats, because it holds the masters of a training
    trained_only: bool = False  # frozen parameters and buffers are not in it


class CheckpointSource:
    """A checkpoint of Ballast, and what reads it. With a manifest, its tensors have no pieces until the indexes are read: by
    all ranks together in wrap(), or by this rank alone when it reads a value before."""

    def __init__(self, checkpoint: Checkpoint, place: Place | None = None, manifest: bytes = b""):
        self.checkpoint, self._place, self.manifest = checkpoint, place, manifest
        self.where = str(Path(checkpoint.files[0]).parent) if place is None else str(place.path)

    def read_together(self, group: Group) -> None:
        assert self._place is not None
        self.checkpoint = read_together(self._place, self.manifest, Agreement(group, LOADING))
        self.manifest = b""

    @cached_property
    def reader(self) -> Reader:
        if self._place is not None and self.manifest:
            indexes = self._place.read_indexes(self.manifest, 0, 1)
            self.checkpoint, self.manifest = self._place.parse(self.manifest, indexes, 0), b""
        return self.checkpoint.reader()


class CheckpointTensor(StoredTensor):
    """A parameter or a buffer in a checkpoint of Ballast, or a moment in fp32. Each chunk is read as a whole, and compared with
    its checksum."""

    def __init__(self, name: str, source: CheckpointSource, dtype: torch.dtype | None = None, kind: str = "parameter"):
        entry = source.checkpoint.tensors[name]
        own: torch.dtype = getattr(torch, entry.dtype)
        super().__init__(own if dtype is None else dtype, tuple(entry.shape), source.where, source)
        self._name, self._role, self._checkpoint = name, entry.role, source
        self._kind = kind  # or "momentum" or "variance"

    def in_format(self, dtype: torch.dtype) -> StoredTensor:
        """Return the tensor in another format; in fp32 with the bits of a trained parameter's master."""
        if self._role == "trained" and dtype is torch.float32:
            return CheckpointTensor(self._name, self._checkpoint, dtype)
        return super().in_format(dtype)

    def read(self, first: int, count: int, into: int) -> None:
        reader, checkpoint = self._checkpoint.reader, self._checkpoint.checkpoint
        entry = checkpoint.tensors[self._name]
        checkpoint.fetch(entry.pieces_of(first, count))
        if entry.kind is None:
            reader.copy_elements(self._name, entry, (first, count), into)
        else:
            read_state(partial(reader.copy, self._name, entry), self._kind, first, tensor_at(into, count, self.dtype))


def weights_in(files: Files, model: torch.nn.Module | None = None) -> Weights:
    """Return the weights in a checkpoint of any kind, or in files of safetensors or torch.save(). Reads no values. A model says
    which of several sets of weights is meant."""
    is_remote = isinstance(files, str) and is_address(files)
    path = Path(files) if isinstance(files, (str, os.PathLike)) and not is_remote else None
    kind = kind_of(path) if path is not None else ""
    if is_remote or kind in ("ballast", "run"):
        origin = CheckpointSource(recorded(path)) if path and kind == "run" else _current(files, path, model)
        return Weights(_tensors_of(origin), trained_only=bool(origin.checkpoint.converted_from))
    if path is None or kind in ("", "safetensors"):
        return Weights(tensors_in(files), has_masters=False)
    names = None
    if model is not None:
        parameters, buffers = named_parameters(model), named_buffers(model)
        shapes = {name: tuple(each.shape) for name, each in [*parameters, *buffers]}
        names = Names([name for name, _ in named_parameters(model)], shapes)
    source = source_of(path, names)
    found = {name: stored for name in source.names() if (stored := source.tensor(name)) is not None}
    return Weights(found, has_masters=source.has_masters, trained_only=source.trained_only)


def _current(files: Files, path: Path | None, model: torch.nn.Module | None) -> CheckpointSource:
    """Return the checkpoint in a directory or at an address. The ranks that keep a model's parameters read it together;
    those of a deferred model do so later."""
    place: Place = RemoteCheckpoint(newest(Remote(str(files)))) if path is None else LocalCheckpoint(path)
    parameters = [] if model is None else [*model.parameters()]
    if owned := by_owner(parameters):
        return CheckpointSource(use_current(place, owned[0][0].group, partial(read_together, place)))
    if any(map(is_on_meta, parameters)):
        text = place.read_text()
        return CheckpointSource(outlined(text, str(place.path)), place, text)
    return CheckpointSource(place.read())


def _tensors_of(source: CheckpointSource) -> dict[str, StoredTensor]:
    tensors = source.checkpoint.tensors.items()
    return {name: CheckpointTensor(name, source) for name, entry in tensors if entry.role in (*PARAMETERS, "buffer")}


def state_in(checkpoint: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
    """Return what the optimizer keeps in a checkpoint of Ballast, by parameter and by torch's name. Reads no values."""
    source = CheckpointSource(checkpoint)
    moments = {name: saved.moments for saved in checkpoint.optimizers for name in parameters_of(saved)}
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, entry in checkpoint.tensors.items():
        parameter, colon, key = name.rpartition(": ")
        if entry.kind is not None:
            for kind, torch_name in moments.get(name, {}).items():
                if getattr(entry.kind, kind):
                    found.setdefault(name, {})[torch_name] = CheckpointTensor(name, source, torch.float32, kind)
        elif colon and entry.role not in (*PARAMETERS, "buffer"):
            found.setdefault(parameter, {})[key] = CheckpointTensor(name, source)
    return found


def restore(model: torch.nn.Module, files: Files) -> None:
    weights = weights_in(files, model)
    names = names_of(unwrapped(model))
    known = {**names, **dict(named_buffers(model))}
    own = names_in_model(weights.tensors.keys(), known)
    stored = converted(unwrapped(model), {own[name]: each for name, each in weights.tensors.items()}, known)
    require_known(stored, known)
    if weights.trained_only:
        leave_untrained(model, names, stored)
    found = [(tensor, stored_format(tensor, each, weights), name) for tensor, each, name in match(names, stored)]
    for tensor, each, name in found:
        require_same(tensor, each, name)
    parameters = {tensor: stored_part(each, tensor) for tensor, each, _ in found if isinstance(tensor, torch.nn.Parameter)}
    for owner, owned in by_owner(parameters):
        owner.write({parameter: parameters.pop(parameter) for parameter in owned})
    with torch.no_grad(), without_modes():  # it may be called inside of a block of deferred()
        for parameter, each in parameters.items():
            if is_on_meta(parameter) or each.is_late and type(parameter) is torch.nn.Parameter:
                begin_with_file(parameter, each)
            else:
                local_tensor(parameter).copy_(each.read_all())
        restore_buffers(model, {id(tensor): each for tensor, each, _ in found})


def stored_format(tensor: torch.Tensor, stored: StoredTensor, weights: Weights) -> StoredTensor:
    """Return what a training has stored in the format of the model's tensor."""
    both_are_numbers = tensor.dtype.is_floating_point and stored.dtype.is_floating_point
    if weights.has_masters and both_are_numbers and tensor.dtype != stored.dtype:
        return stored.in_format(tensor.dtype)
    return stored


def leave_untrained(model: torch.nn.Module, names: dict[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Leave out the model's frozen parameters and buffers that a checkpoint of trained parameters lacks."""
    there = {id(tensor) for name, tensor in names.items() if name in stored}
    left = [name for name, each in names.items() if id(each) not in there and not each.requires_grad]
    require_expected(model, (each for name, each in named_buffers(model) if name not in left))
    for name in left:
        del names[name]
    warn_of_left(left, rank_in_job())


def names_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that files must hold, by name. A tensor that several modules share has several names."""
    parameters = {unwrapped_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
    return parameters | buffers_by_name(model, remove_duplicate=False)


def require_known(stored: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(stored) - set(known))
    if unknown:
        refuse(
            f"cannot load: {len(unknown)} tensors of the files are not in the model, such as {unknown[0]}",
            needed="the names of the model's parameters and buffers",
            remedy=nearest(unknown[0], known),
        )


def match(names: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> list[Match]:
    """Return each tensor of the model with the first of its names that the files have."""
    found: dict[int, Match] = {}
    for name, tensor in names.items():
        if name in stored and id(tensor) not in found:
            found[id(tensor)] = (tensor, stored[name], name)
    missing = [name for name, tensor in names.items() if id(tensor) not in found]
    if missing:
        refuse(
            f"cannot load: {len(missing)} of the model's tensors are not in the files, such as {missing[0]}",
            needed="all parameters, and all buffers that a state_dict() has",
            remedy=nearest(missing[0], stored),
        )
    return list(found.values())


def nearest(name: str, others: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, others, n=3, cutoff=0.5)
    return f"The nearest names are: {', '.join(near)}." if near else "No name is close to it."


def require_same(tensor: torch.Tensor, stored: StoredTensor, name: str) -> None:
    where = f"{name} in {stored.where}"
    if tuple(full_shape(tensor)) != stored.shape:
        refuse(
            "cannot load a tensor: it has another shape in the files than in the model",
            where=where,
            needed=str(tuple(full_shape(tensor))),
            available=str(stored.shape),
        )
    if tensor.dtype != stored.dtype:
        fail(
            "wrong_dtype",
            "cannot load a tensor: it has another format in the files than in the model",
            where=where,
            needed=str(tensor.dtype),
            available=str(stored.dtype),
            remedy=f"Construct the model in {stored.dtype}, or convert the files.",
        )


def restore_buffers(model: torch.nn.Module, stored: Mapping[int, StoredTensor]) -> None:
    def restored(buffer: torch.Tensor) -> torch.Tensor | None:
        if id(buffer) not in stored:
            return None
        if stored[id(buffer)].is_late:
            return read_later(stored[id(buffer)], device_of(buffer))
        values = stored[id(buffer)].read_all()
        if is_on_meta(buffer):
            return values.to(device_of(buffer))
        buffer.copy_(values)
        return None

    replace_buffers(model, restored)
