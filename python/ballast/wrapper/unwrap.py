"""A model without what torch has put around it, or around parts of it: with it or without, tensors have the same names."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # what torch.compile() calls a module inside of its own
PARALLEL = "module"  # and what DistributedDataParallel does


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself. Parts of it that are compiled stay as they are.

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
    """
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


def own_names(saved: Collection[str], known: Container[str]) -> dict[str, str]:
    """By the name under which a tensor was saved, the model's own. They differ where it was saved with the names that it has
    inside of something else. State of a tensor has its name and more.

    >>> own_names(["module.weight", "module._orig_mod.bias: exp_avg", "cells"], {"weight", "bias"})
    {'module.weight': 'weight', 'module._orig_mod.bias: exp_avg': 'bias: exp_avg', 'cells': 'cells'}
    """
    names = {}
    for name in saved:
        tensor, colon, state = name.partition(": ")
        bare = unwrapped_name(tensor)
        own = next((each for each in (tensor, bare, bare.removeprefix(f"{PARALLEL}.")) if each in known), tensor)
        own += colon + state
        names[name] = name if own in saved else own  # none takes the place of another
    return names
