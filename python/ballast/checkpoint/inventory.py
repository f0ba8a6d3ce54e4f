"""List the tensors of a training by name: the sharded state, and the full tensors that torch holds on each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ballast.checkpoint.contents import Tensor
from ballast.checkpoint.custom_state import custom_state
from ballast.checkpoint.torch_tensors import TorchTensor, Writers, frozen_state, moment_name
from ballast.checks import refuse
from ballast.torch.calls.hooks import trainer_of
from ballast.torch.optimizer import WrappedOptimizer
from ballast.torch.parameters.placeholder import plain
from ballast.torch.parameters.units import Member, names_of
from ballast.torch.tensor_names import named_parameters, unwrapped, unwrapped_name
from ballast.torch.training.checkpoint_access import CheckpointAccess
from ballast.torch.training.partition import Partition

log = logging.getLogger("ballast")


def accesses_of(optimizers: Any, model: torch.nn.Module) -> list[CheckpointAccess]:
    """Return the view of each optimizer: of one, or of all in a list. Refuse to leave out one that trains the model."""
    accesses = [access_of(each) for each in (optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])]
    if not accesses:
        refuse("cannot save or load a training without optimizers", needed="an optimizer of ballast.wrap(), or a list of them")
    known = {id(parameter) for access in accesses for _, parameter in access.parameters()}
    of_siblings = {id(parameter) for access in accesses for parameter in access.parameters_of_siblings()}
    for name, parameter in named_parameters(model):
        if id(parameter) not in known and (id(parameter) in of_siblings or trainer_of(parameter) is not None):
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


def access_of(optimizer: Any) -> CheckpointAccess:
    if not isinstance(optimizer, WrappedOptimizer):
        refuse(f"cannot save or load a {type(optimizer).__name__}: it is not wrapped", needed="an optimizer of ballast.wrap()")
    optimizer._ballast.partitions.require_open("call ballast.save() or ballast.load_checkpoint()")
    return optimizer._ballast.checkpoint


def checkpoints_in(accesses: Sequence[CheckpointAccess], directory: Path) -> set[str]:
    """Return the folders of the checkpoints that this training has loaded, saved or replaced in the directory."""
    return set().union(*(access.checkpoints.get(os.path.realpath(directory), ()) for access in accesses))


def know_checkpoints(accesses: Sequence[CheckpointAccess], directory: Path, folders: Collection[str]) -> None:
    """Remember the folders of the directory from now on, with each optimizer."""
    for access in accesses:
        access.checkpoints[os.path.realpath(directory)] = set(folders)


def of_this_training(accesses: Sequence[CheckpointAccess]) -> set[str]:
    """Return such folders in all directories, because the user may have copied one to another."""
    return set().union(*(folders for access in accesses for folders in access.checkpoints.values()))


def parameter_names(model: torch.nn.Module, accesses: Sequence[CheckpointAccess]) -> dict[int, str]:
    """Return names by id, of the parameters of the model and of those that only the optimizers have."""
    return names_of(_groups(accesses), model)


def _groups(accesses: Sequence[CheckpointAccess]) -> list[dict[str, Any]]:
    return [group for access in accesses for group in access.optimizer.param_groups]


def require_all_partitioned(access: CheckpointAccess, names: Mapping[int, str]) -> None:
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


def parameters_by_name(model: torch.nn.Module, accesses: Sequence[CheckpointAccess]) -> dict[str, torch.nn.Parameter]:
    everywhere = [*model.parameters(), *(parameter for group in _groups(accesses) for parameter in group["params"])]
    by_id = {id(parameter): parameter for parameter in everywhere}
    return {name: by_id[number] for number, name in parameter_names(model, accesses).items()}


def buffers_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict() has. Others are computed anew."""
    found = {}
    for path, module in unwrapped(model).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[unwrapped_name(f"{path}.{name}" if path else name)] = buffer
    return found


def warn_of_left(names: Sequence[str], access: CheckpointAccess) -> None:
    """Name the tensors that a checkpoint of another program lacks."""
    if names and access.group.rank == 0:
        log.warning("these tensors stay as they are, because the checkpoint does not hold them: %s", ", ".join(sorted(names)))


def torch_tensors(
    model: torch.nn.Module, accesses: Sequence[CheckpointAccess], partitions: Sequence[Partition]
) -> Iterator[TorchTensor]:
    """Yield the tensors that torch holds, in the same order on all ranks."""
    names = parameter_names(model, accesses)
    partitioned = {id(member.parameter) for partition in partitions for member in partition.all_members}
    for name, parameter in parameters_by_name(model, accesses).items():
        if id(parameter) not in partitioned:
            yield TorchTensor(name, "frozen", plain(parameter), steps=max(_steps_of(each, parameter) for each in accesses))
    for access, partition in zip(accesses, partitions):
        if access.has_custom_step:
            yield from custom_state(access, partition, names)
        else:
            yield from frozen_moments(access, names)
    for name, buffer in buffers_by_name(model).items():
        yield TorchTensor(name, "buffer", buffer.detach(), Writers.first)


def frozen_moments(access: CheckpointAccess, names: dict[int, str]) -> Iterator[TorchTensor]:
    for parameter, values in frozen_state(access):
        for moment, value in values.items():
            if moment != "step":
                yield TorchTensor(moment_name(names[id(parameter)], moment), "moment", value)


def entry_of(held: TorchTensor) -> Tensor:
    """Describe a tensor that torch holds, for the manifest."""
    tensor = held.tensor
    return Tensor(
        held.role,
        str(tensor.dtype).removeprefix("torch."),
        tensor.element_size(),
        list(tensor.shape if held.full_shape is None else held.full_shape),
        steps=held.steps,
    )


def entry_of_member(member: Member, partition: Partition, access: CheckpointAccess) -> Tensor:
    """Describe a sharded parameter, for the manifest."""
    parameter = member.parameter
    entry = Tensor(
        "frozen" if member.group is None else "trained",
        str(parameter.dtype).removeprefix("torch."),
        parameter.element_size(),
        list(parameter.shape),
        steps=_steps_of(access, parameter, member),
    )
    if member.group is not None:
        kind = partition.kind(member)
        assert kind.format is not None
        entry.format, entry.momentum, entry.variance = kind.format.name, kind.momentum, kind.variance
    return entry


def _steps_of(access: CheckpointAccess, parameter: torch.nn.Parameter, member: Member | None = None) -> int:
    """Return the number of steps that have trained the parameter."""
    if member is None or member.group is None:
        return int(access.frozen_state.get(id(parameter), {}).get("step", 0))
    return access.steps - member.missed
