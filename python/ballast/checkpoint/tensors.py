"""The tensors of a training by name: the sharded state and the full tensors that torch holds on each rank, as they are saved,
and as they are filled with chunks of a checkpoint that are read ahead."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.checkpoint.manifest import PARAMETER_DTYPES, Reader, slices
from ballast.checks import refuse
from ballast.torch.calls.hooks import receiver_of
from ballast.torch.optimizer import WrappedOptimizer
from ballast.torch.parameters.managed_parameter import plain
from ballast.torch.parameters.units import UnitParameter, named_parameters, names_of, unwrapped, unwrapped_name
from ballast.torch.parts import Part, Ranges, full_ranges, full_shape, part_of
from ballast.torch.training.partition import Partition
from ballast.torch.training.training import Training
from ballast.torch.updates.sharded_state import LazyState

log = logging.getLogger("ballast")

SLICE = 1 << 20  # elements of a chunk of torch's tensors, or that are read at once
GROUP = 128  # elements that share a scale; SLICE is a multiple
SAVING, LOADING = "saving a checkpoint", "loading a checkpoint"  # what other ranks have failed at


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
    steps: int = 0  # steps that have trained a parameter that is frozen now
    begin: int = 0  # first element of the shard in the full tensor
    full_shape: torch.Size | None = None  # the shape of the full tensor, if this is a shard
    part: Part | None = None  # the part of a full tensor that it, or the tensor of which it is a shard, is
    is_mine: bool = True  # this rank saves it, and not another one with the same part

    def of(self, access: Training, parameter: torch.nn.Parameter) -> TorchTensor:
        """Return the same as values or state of a parameter."""
        shape, part, is_mine = full_shape(parameter), part_of(parameter), access.ranks.saves(parameter)
        writers, sharing = self.writers, access.ranks.sharing(parameter)
        if writers is Writers.in_turns and sharing is not access.group:  # each part has a first rank
            writers, is_mine = Writers.each, is_mine and sharing.rank == 0
        return replace(self, writers=writers, full_shape=shape, part=part, is_mine=is_mine)

    def read(self) -> torch.Tensor:
        """Return the tensor, read from the library's memory if that has it."""
        return self.tensor.read_now() if isinstance(self.tensor, LazyState) else self.tensor


def moment_name(parameter: str, moment: str) -> str:
    """Return the name of a moment in a checkpoint.

    >>> moment_name("layer.weight", "exp_avg")
    'layer.weight: exp_avg'
    """
    return f"{parameter}: {moment}"


def frozen_state(access: Training) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """Return the optimizer state of the parameters that are frozen now."""
    known = ((parameter, access.state.frozen_state.get(id(parameter))) for _, parameter in access.parameters())
    return [(parameter, values) for parameter, values in known if values]


def accesses_of(optimizers: Any, model: torch.nn.Module) -> list[Training]:
    """Return the view of each optimizer: of one, or of all in a list. Refuse to leave out one that trains the model."""
    accesses = [access_of(each) for each in (optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])]
    if not accesses:
        refuse("cannot save or load a training without optimizers", needed="an optimizer of ballast.wrap(), or a list of them")
    known = {id(parameter) for access in accesses for _, parameter in access.parameters()}
    siblings = {id(parameter) for access in accesses for parameter in access.parameters_of_siblings()}
    for name, parameter in named_parameters(model):
        if id(parameter) not in known and (id(parameter) in siblings or receiver_of(parameter) is not None):
            refuse(
                "cannot save or load a training without one of its optimizers: another one trains the model too",
                where=f"parameter {name}",
                needed="all optimizers of the model in a list, such as ballast.save(directory, model, [one, other])",
            )
    ranks = {(access.group.rank, access.group.size) for access in accesses}
    if len(ranks) > 1 or (len(accesses) > 1 and any(access.outer is not None for access in accesses)):
        refuse(
            "cannot save or load these optimizers together: different ranks train with them, or outer= exchanges parameters",
            needed="optimizers of one model with the same process group",
        )
    return accesses


def access_of(optimizer: Any) -> Training:
    if not isinstance(optimizer, WrappedOptimizer):
        refuse(f"cannot save or load a {type(optimizer).__name__}: it is not wrapped", needed="an optimizer of ballast.wrap()")
    optimizer._ballast.require_open("call ballast.save() or ballast.load_checkpoint()")
    return optimizer._ballast


def checkpoints_in(accesses: Sequence[Training], directory: Path) -> set[str]:
    """Return the folders of the checkpoints that this training has loaded, saved or replaced in the directory."""
    return set().union(*(access.checkpoints.get(os.path.realpath(directory), ()) for access in accesses))


def know_checkpoints(accesses: Sequence[Training], directory: Path | str, folders: Collection[str]) -> None:
    """Remember the folders of the directory from now on, with each optimizer."""
    for access in accesses:
        access.checkpoints[os.path.realpath(directory)] = set(folders)


def folders_of_all(accesses: Sequence[Training]) -> set[str]:
    """Return such folders in all directories, because the user may have copied one to another."""
    return set().union(*(folders for access in accesses for folders in access.checkpoints.values()))


def parameter_names(model: torch.nn.Module, accesses: Sequence[Training]) -> dict[int, str]:
    """Return names by id, of the parameters of the model and of those that only the optimizers have."""
    return names_of(_groups(accesses), model)


def _groups(accesses: Sequence[Training]) -> list[dict[str, Any]]:
    return [group for access in accesses for group in access.optimizer.param_groups]


def require_all_partitioned(access: Training, names: Mapping[int, str]) -> None:
    """Refuse a part of the model where stage 3 shards, or may shard, the rest too. `names` are those of the part."""
    if access.options.keeps_full_parameters:
        return
    for number, name in access.names().items():
        if number not in names:
            refuse(
                "cannot save or load a part of a model: the rest of it is sharded too",
                where=f"parameter {name}, which is in the rest",
                needed="the model that was given to ballast.wrap()",
            )


def parameters_by_name(model: torch.nn.Module, accesses: Sequence[Training]) -> dict[str, torch.nn.Parameter]:
    everywhere = [*model.parameters(), *(parameter for group in _groups(accesses) for parameter in group["params"])]
    by_id = {id(parameter): parameter for parameter in everywhere}
    return {name: by_id[number] for number, name in parameter_names(model, accesses).items()}


def buffers_by_name(model: torch.nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict() has, also under the names of further modules that share one with
    `remove_duplicate=False`. Others are computed anew."""
    found = {}
    for path, module in unwrapped(model).named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=remove_duplicate):
            if name not in module._non_persistent_buffers_set:
                found[unwrapped_name(f"{path}.{name}" if path else name)] = buffer
    return found


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the buffers of a state_dict(), by name. A tensor of several modules has its first name."""
    return {**dict(named_parameters(model)), **buffers_by_name(model)}


def warn_of_left(names: Sequence[str], rank: int) -> None:
    """Name the tensors that a checkpoint of another program lacks."""
    if names and rank == 0:
        log.warning("these tensors stay as they are, because the checkpoint does not hold them: %s", ", ".join(sorted(names)))


def entry_of(held: TorchTensor) -> _core.SavedTensor:
    shape = held.tensor.shape if held.full_shape is None else held.full_shape
    return saved_tensor(held.role, held.tensor.dtype, shape, steps=held.steps)


def saved_tensor(
    role: str, dtype: torch.dtype, shape: Sequence[int], *, kind: _core.ChunkKind | None = None, steps: int = 0
) -> _core.SavedTensor:
    """Describe a tensor for the manifest. `kind` is that of chunks with state."""
    name = str(dtype).removeprefix("torch.")
    return _core.SavedTensor(role=role, dtype=name, item_bytes=dtype.itemsize, shape=list(shape), kind=kind, steps=steps)


def entry_of_member(member: UnitParameter, partition: Partition, access: Training) -> _core.SavedTensor:
    parameter, steps = member.parameter, steps_of(access, member.parameter, member)
    if member.group is None:
        return saved_tensor("frozen", parameter.dtype, full_shape(parameter), steps=steps)
    return saved_tensor("trained", parameter.dtype, full_shape(parameter), kind=partition.core.kind(member.unit), steps=steps)


def steps_of(access: Training, parameter: torch.nn.Parameter, member: UnitParameter | None = None) -> int:
    if member is None or member.group is None:
        return int(access.state.frozen_state.get(id(parameter), {}).get("step", 0))
    return access.steps - member.missed


def pieces_of(entry: _core.SavedTensor, part: Part | None, first: int, count: int) -> list[_core.Piece]:
    """Return the pieces with elements of a parameter, which may be a part of a full tensor."""
    return [piece for there, some, _ in full_ranges(part, first, count) for piece in entry.pieces_of(there, some)]


def read_elements(reader: Reader, name: str, entry: _core.SavedTensor, ranges: Ranges, count: int) -> torch.Tensor:
    """Return elements without state, which are in these ranges of the full tensor."""
    flat = torch.empty(count, dtype=getattr(torch, entry.dtype), device="cpu")
    for there, some, at in ranges:
        reader.copy_elements(name, entry, (there, some), flat.data_ptr() + at * flat.element_size())
    return flat


class Target(ABC):
    """A tensor to fill with these elements of a checkpoint's tensor."""

    def __init__(self, name: str, entry: _core.SavedTensor, first: int, count: int, part: Part | None = None):
        self.name, self.entry, self.first, self.count, self.part = name, entry, first, count, part

    @property
    def pieces(self) -> list[_core.Piece]:
        return pieces_of(self.entry, self.part, self.first, self.count)

    @abstractmethod
    def fill(self, reader: Reader) -> None: ...


class PlainTensor(Target):
    """A buffer, a frozen parameter or its moments: all of its elements, or a shard."""

    def __init__(self, name: str, entry: _core.SavedTensor, tensor: torch.Tensor, first: int = 0, part: Part | None = None):
        super().__init__(name, entry, first, tensor.numel(), part)
        self._tensor = tensor

    def fill(self, reader: Reader) -> None:
        ranges = full_ranges(self.part, self.first, self.count)
        flat = read_elements(reader, self.name, self.entry, ranges, self.count)
        self._tensor.copy_(flat.view(self._tensor.shape))


def state_part(values: Mapping[str, torch.Tensor]) -> _core.StatePart:
    """Show a parameter and its moments ("momentum", "variance") to the library. The caller keeps them alive."""
    parameter = values["parameter"]
    dtype = PARAMETER_DTYPES[str(parameter.dtype).removeprefix("torch.")]
    return _core.StatePart(dtype=dtype, count=parameter.numel(), **{kind: each.data_ptr() for kind, each in values.items()})


def read_state(copy: Callable[[int, _core.StatePart], None], kind: str, first: int, into: torch.Tensor) -> None:
    """Read elements of a parameter, or of one of its moments: `copy` brings stored elements, from the first one on, to a part.
    The parts of a state begin at multiples of GROUP elements."""
    for begin, count in slices(into.numel(), SLICE):
        before = (first + begin) % GROUP
        values = {each: torch.zeros(before + count, dtype=into.dtype, device="cpu") for each in ("parameter", kind)}
        copy(first + begin - before, state_part(values))
        into[begin : begin + count] = values[kind][before:]


class TrainedTensor(Target):
    """Takes a parameter that was trained, and is frozen now, with its moments. Its values go to the shards where it is
    sharded."""

    def __init__(
        self,
        name: str,
        entry: _core.SavedTensor,
        parameter: torch.Tensor,
        moments: Mapping[str, torch.Tensor],
        *,
        is_sharded: bool,
    ):
        super().__init__(name, entry, 0, parameter.numel(), part_of(parameter))
        self._shape, self._parameter = parameter.shape, None if is_sharded else plain(parameter)
        self._moments = moments

    def fill(self, reader: Reader) -> None:
        dtype = torch.float32 if self._parameter is None else self._parameter.dtype
        values = torch.empty(self._shape, dtype=dtype, device="cpu")
        into = state_part({"parameter": values, **self._moments})
        for there, some, at in full_ranges(self.part, self.first, self.count):
            reader.copy(self.name, self.entry, there, into.elements(at, some))
        if self._parameter is not None:
            self._parameter.copy_(values)
