"""Check that a checkpoint fits this model and its optimizers, and name the difference if it does not."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from ballast.checkpoint.contents import PARAMETER_DTYPES, Checkpoint, SavedOptimizer
from ballast.checks import refuse
from ballast.torch.parameters.units import is_opaque
from ballast.torch.tensor_names import names_in_model
from ballast.torch.training.checkpoint_access import CheckpointAccess


def use_model_names(checkpoint: Checkpoint, known: Container[str]) -> None:
    """Rename the tensors of an older checkpoint, whose names include those of wrappers around the model."""
    names = names_in_model(checkpoint.tensors.keys(), known)
    checkpoint.tensors = {names[name]: tensor for name, tensor in checkpoint.tensors.items()}
    for saved in checkpoint.optimizers:
        for group in saved.groups:
            group["parameters"] = [names.get(name, name) for name in group["parameters"]]


def leave_out(
    checkpoint: Checkpoint, parameters: dict[str, torch.nn.Parameter], buffers: dict[str, torch.Tensor]
) -> list[str]:
    """Leave tensors of the model that a converted checkpoint lacks out of the loading, and its further tensors too, as an
    import of the other program's checkpoint does. Return the names of the model's tensors that stay as they are."""
    if not checkpoint.converted_from:
        return []
    saved = checkpoint.tensors
    checkpoint.tensors = {name: entry for name, entry in saved.items() if name in parameters or name in buffers}
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in saved:
            refuse("the checkpoint lacks a parameter that is trained", where=name, needed="all of them, under these names")
    left = [name for name in (*parameters, *buffers) if name not in saved]
    for name in left:
        parameters.pop(name, None)
        buffers.pop(name, None)
    return left


def require_compatible(
    checkpoint: Checkpoint,
    accesses: Sequence[CheckpointAccess],
    parameters: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    names: Mapping[int, str],
) -> None:
    """Raise B1001 where names, shapes, optimizer or parameter groups differ."""
    saved = checkpoint.tensors
    if not checkpoint.converted_from:  # else nothing says which tensors are buffers
        _require_names("parameter", parameters, [name for name, entry in saved.items() if entry.is_parameter()])
        _require_names("buffer", buffers, [name for name, entry in saved.items() if entry.role == "buffer"])
    for name, tensor in {**parameters, **buffers}.items():
        entry = saved[name]
        if entry.shape != list(tensor.shape):
            refuse(
                f"the checkpoint holds a tensor of shape {tuple(entry.shape)}",
                where=name,
                needed=f"{tuple(tensor.shape)}, the shape in the model",
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, torch.nn.Parameter) and is_opaque(tensor) and entry.dtype != dtype:
            what = f"cannot load a packed parameter of {dtype} from a checkpoint that has {entry.dtype}"
            refuse(what, where=name, needed="a model that is quantized as the saved one")
        if entry.role == "trained" and dtype not in PARAMETER_DTYPES:
            what = f"cannot load a parameter of {entry.dtype}: it is {tensor.dtype} in this model"
            refuse(what, where=name, needed=f"a model with one of {', '.join(PARAMETER_DTYPES)} there")
    if len(checkpoint.optimizers) != len(accesses):
        refuse(
            f"the checkpoint has {_counted(len(checkpoint.optimizers))}: "
            f"{', '.join(each.optimizer for each in checkpoint.optimizers)}",
            needed=f"{_counted(len(accesses))}, as many as are loaded: load_checkpoint(directory, model, [one, other])",
        )
    for each, access in zip(checkpoint.optimizers, accesses):
        _require_optimizer(each, access)
        if not checkpoint.converted_from:
            _require_groups(each, access, names)


def _counted(optimizers: int) -> str:
    return "one optimizer" if optimizers == 1 else f"{optimizers} optimizers"


def _require_names(kind: str, ours: Iterable[str], theirs: Iterable[str]) -> None:
    here, there = set(ours), set(theirs)
    for missing, known, what in (
        (sorted(here - there), there, f"the checkpoint lacks a {kind} of the model"),
        (sorted(there - here), here, f"the checkpoint holds a {kind} that the model lacks"),
    ):
        if missing:
            near = difflib.get_close_matches(missing[0], sorted(known), n=1, cutoff=0.5)
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            refuse(
                what,
                where=missing[0] + rest,
                needed="the model that was saved",
                remedy=f"The nearest name on the other side is {near[0]}." if near else "",
            )


def _require_optimizer(saved: SavedOptimizer, access: CheckpointAccess) -> None:
    moments = {moment.name: name for moment, name in access.names_of_moments()}
    other_custom_step = access.has_custom_step and type(access.optimizer).__name__ != saved.optimizer
    if moments != saved.moments or access.has_custom_step != saved.own_step or other_custom_step:
        refuse(
            f"cannot load a checkpoint of {saved.optimizer} into {type(access.optimizer).__name__}: their states differ",
            needed=f"an optimizer that keeps {_state_kept(saved)}",
        )


def _require_groups(saved: SavedOptimizer, access: CheckpointAccess, names: Mapping[int, str]) -> None:
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in access.optimizer.param_groups]
    groups_saved = [group["parameters"] for group in saved.groups]
    if len(groups) != len(groups_saved):
        refuse(f"the checkpoint has {len(groups_saved)} parameter groups", needed=f"{len(groups)}, the number in the optimizer")
    for number, (ours, theirs) in enumerate(zip(groups, groups_saved)):
        others = sorted(set(ours) ^ set(theirs))
        if others:
            refuse(
                "a parameter is in another group than in the checkpoint",
                where=f"param_groups[{number}]: {others[0]}",
                needed="the same groups",
            )


def _state_kept(saved: SavedOptimizer) -> str:
    if saved.own_step:
        return f"what {saved.optimizer} keeps"
    return " and ".join(saved.moments.values()) or "no moments"
