"""Models without torch's wrappers around them or around parts of them. Tensors have the same names with and without."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # the name that torch.compile() gives to the original module inside its own
PARALLEL = "module"  # the name that DistributedDataParallel gives


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself. Compiled parts of it stay as they are.

    >>> model = torch.nn.Linear(2, 1)
    >>> unwrapped(torch.compile(model)) is model
    True
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), torch.nn.Module):
            model = inner
        else:
            return model


def unwrapped_name(name: str) -> str:
    """Return a tensor's name without the names of wrappers.

    >>> unwrapped_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(word for word in name.split(".") if word != COMPILED)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in unwrapped(model).named_parameters():
        yield unwrapped_name(name), parameter


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in unwrapped(model).named_buffers():
        yield unwrapped_name(name), buffer


def names_in_model(saved: Collection[str], known: Container[str]) -> dict[str, str]:
    """Return the model's own name of each saved tensor. They differ if it was saved from inside a wrapper.

    The name of a tensor's state begins with the tensor's name.

    >>> names_in_model(["module.weight", "module._orig_mod.bias: exp_avg", "cells"], {"weight", "bias"})
    {'module.weight': 'weight', 'module._orig_mod.bias: exp_avg': 'bias: exp_avg', 'cells': 'cells'}
    """
    names = {}
    for name in saved:
        tensor, colon, state = name.partition(": ")
        bare = unwrapped_name(tensor)
        own = next((each for each in (tensor, bare, bare.removeprefix(f"{PARALLEL}.")) if each in known), tensor)
        own += colon + state
        names[name] = name if own in saved else own  # no name replaces another
    return names
