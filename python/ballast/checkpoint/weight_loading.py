"""Load files into a model's parameters and buffers."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping

import torch

from ballast import _core
from ballast._torch_compat import without_modes
from ballast.checkpoint.weights import Weights, weights_in
from ballast.checks import fail, refuse
from ballast.torch.parameters.deferred_init import is_on_meta
from ballast.torch.parameters.deferred_parameters import begin_with_file, device_of, require_expected
from ballast.torch.parameters.managed_parameter import by_owner
from ballast.torch.parameters.stored_tensors import Files, StoredTensor
from ballast.torch.process_groups import rank_in_job
from ballast.torch.tensor_names import named_buffers, names_in_model, unwrapped, unwrapped_name

log = logging.getLogger("ballast")


def restore(model: torch.nn.Module, files: Files) -> None:
    weights = weights_in(files, model)
    names = dict(names_of(unwrapped(model)))
    known = [*names, *(name for name, _ in named_buffers(model))]
    own = names_in_model(weights.tensors.keys(), set(known))
    stored = {own[name]: each for name, each in weights.tensors.items()}
    require_known(stored, known)
    if weights.trained_only:
        leave_untrained(model, names, stored)
    found = [(tensor, in_format_of(tensor, each, weights), name) for tensor, each, name in match(names, stored)]
    for tensor, each, name in found:
        require_same(tensor, each, name)
    parameters = {tensor: each for tensor, each, _ in found if isinstance(tensor, torch.nn.Parameter)}
    for owner, owned in by_owner(parameters):
        owner.write({parameter: parameters.pop(parameter) for parameter in owned})
    with torch.no_grad(), without_modes():  # it may be called inside of a block of deferred()
        for parameter, each in parameters.items():
            if is_on_meta(parameter):
                begin_with_file(parameter, each)
            else:
                parameter.copy_(each.read_all())
        restore_buffers(model, {id(tensor): each for tensor, each, _ in found})


def in_format_of(tensor: torch.Tensor, stored: StoredTensor, weights: Weights) -> StoredTensor:
    """Return what a training has stored in the format of the model's tensor."""
    both_are_numbers = tensor.dtype.is_floating_point and stored.dtype.is_floating_point
    if weights.of_training and both_are_numbers and tensor.dtype != stored.dtype:
        return stored.in_format(tensor.dtype)
    return stored


def leave_untrained(model: torch.nn.Module, names: dict[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Leave out the model's frozen parameters and buffers that a checkpoint of trained parameters lacks."""
    there = {id(tensor) for name, tensor in names.items() if name in stored}
    left = [name for name, each in names.items() if id(each) not in there and not each.requires_grad]
    require_expected(model, (each for name, each in named_buffers(model) if name not in left))
    for name in left:
        del names[name]
    if left and rank_in_job() == 0:
        log.warning("these tensors stay as they are, because the checkpoint does not hold them: %s", ", ".join(left))


def names_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that files must hold, by name. A tensor that several modules share has several names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield unwrapped_name(name), parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield unwrapped_name(f"{prefix}.{name}" if prefix else name), buffer


def require_known(stored: Iterable[str], known: list[str]) -> None:
    unknown = sorted(set(stored) - set(known))
    if unknown:
        refuse(
            f"cannot load: {len(unknown)} tensors of the files are not in the model, such as {unknown[0]}",
            needed="the names of the model's parameters and buffers",
            remedy=nearest(unknown[0], known),
        )


Match = tuple[torch.Tensor, StoredTensor, str]  # a tensor of the model, where it is stored, and its name there


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
    if tuple(tensor.shape) != stored.shape:
        refuse(
            "cannot load a tensor: it has another shape in the files than in the model",
            where=where,
            needed=str(tuple(tensor.shape)),
            available=str(stored.shape),
        )
    if tensor.dtype != stored.dtype:
        fail(
            "wrong_dtype",
            _core.Problem(
                what="cannot load a tensor: it has another format in the files than in the model",
                where=where,
                needed=str(tensor.dtype),
                available=str(stored.dtype),
                remedy=f"Construct the model in {stored.dtype}, or convert the files.",
            ),
        )


def restore_buffers(model: torch.nn.Module, stored: Mapping[int, StoredTensor]) -> None:
    made: dict[int, torch.Tensor] = {}  # by id of the one on the meta device, which several modules may share
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or id(buffer) not in stored:
                continue
            if not is_on_meta(buffer):
                buffer.copy_(stored[id(buffer)].read_all())
                continue
            if id(buffer) not in made:
                made[id(buffer)] = stored[id(buffer)].read_all().to(device_of(buffer))
            module._buffers[name] = made[id(buffer)]
