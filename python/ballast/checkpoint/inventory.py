"""List the tensors of a training by name: the sharded state, and the full tensors that torch holds on each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ballast.checkpoint.contents import Tensor
from ballast.checkpoint.custom_state import custom_state
from ballast.checkpoint.torch_tensors import TorchTensor, Writers, frozen_state, moment_name
from ballast.checks import refuse
from ballast.wrapper.checkpoint_access import CheckpointAccess
from ballast.wrapper.optimizer import WrappedOptimizer
from ballast.wrapper.partition import Partition
from ballast.wrapper.ungathered import plain
from ballast.wrapper.units import Member, names_of
from ballast.wrapper.unwrap import unwrapped, unwrapped_name

log = logging.getLogger("ballast")


def access_of(optimizer: Any) -> CheckpointAccess:
    if not isinstance(optimizer, WrappedOptimizer):
        refuse(f"cannot save or load a {type(optimizer).__name__}: it is not wrapped", needed="an optimizer of ballast.wrap()")
    optimizer._ballast.plans.require_open("call ballast.save() or ballast.load_checkpoint()")
    return optimizer._ballast.checkpoint


def checkpoints_in(access: CheckpointAccess, directory: Path) -> set[str]:
    """Return the folders of the checkpoints that this training has loaded, saved or replaced in the directory."""
    return access.checkpoints.setdefault(os.path.realpath(directory), set())


def of_this_training(access: CheckpointAccess) -> set[str]:
    """Return such folders in all directories, because the user may have copied one to another."""
    return set().union(*access.checkpoints.values())


def parameter_names(model: torch.nn.Module, access: CheckpointAccess) -> dict[int, str]:
    """Return names by id, of the parameters of the model and of those that only the optimizer has."""
    return names_of(access.optimizer.param_groups, model)


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


def parameters_by_name(model: torch.nn.Module, access: CheckpointAccess) -> dict[str, torch.nn.Parameter]:
    groups = access.optimizer.param_groups
    everywhere = [*model.parameters(), *(parameter for group in groups for parameter in group["params"])]
    by_id = {id(parameter): parameter for parameter in everywhere}
    return {name: by_id[number] for number, name in parameter_names(model, access).items()}


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


def torch_tensors(model: torch.nn.Module, access: CheckpointAccess, partition: Partition) -> Iterator[TorchTensor]:
    """Yield the tensors that torch holds, in the same order on all ranks."""
    names = parameter_names(model, access)
    partitioned = {id(member.parameter) for member in partition.all_members}
    for name, parameter in parameters_by_name(model, access).items():
        if id(parameter) not in partitioned:
            yield TorchTensor(name, "frozen", plain(parameter), steps=_steps_of(access, parameter))
    if access.has_own_step:
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
    return access.steps - member.begun_at
