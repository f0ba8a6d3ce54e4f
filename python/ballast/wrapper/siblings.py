"""The wrapped optimizers of one model, each of which trains parameters of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from ballast import _core
from ballast.wrapper.options import WrapOptions
from ballast.wrapper.unwrap import unwrapped

ATTRIBUTE = "ballast_siblings"  # of a model


class Sibling(Protocol):
    """An optimizer of the model, as the others see it."""

    @property
    def options(self) -> WrapOptions: ...
    @property
    def call(self) -> object: ...
    @property
    def sharded_ids(self) -> frozenset[int]: ...
    @property
    def optimizer_if_alive(self) -> torch.optim.Optimizer | None: ...
    def parameters(self) -> Iterator[tuple[int, torch.nn.Parameter]]: ...


class Siblings:
    """The attribute of the model. In a copy or a pickle of the model it is empty."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Sibling]] = []
        self.exchanges = _core.ExchangeOrder()  # between GPUs

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()


def optimizers_of(model: torch.nn.Module) -> list[Sibling]:
    """Return the wrapped optimizers of the model, in the order in which they were wrapped."""
    found: Siblings | None = vars(unwrapped(model)).get(ATTRIBUTE)
    there = [sibling for each in found.references if (sibling := each()) is not None] if found is not None else []
    return [sibling for sibling in there if sibling.optimizer_if_alive is not None]


def share_exchanges(model: torch.nn.Module, options: _core.TrainingOptions) -> None:
    """Let the training of an optimizer that has joined exchange in one order with those of the others."""
    found: Siblings | None = vars(unwrapped(model)).get(ATTRIBUTE)
    if found is not None:
        options.share_exchanges(found.exchanges)


def join(model: torch.nn.Module, sibling: Sibling) -> None:
    vars(unwrapped(model)).setdefault(ATTRIBUTE, Siblings()).references.append(weakref.ref(sibling))


def leave(model: torch.nn.Module, sibling: Sibling) -> None:
    """Remove one that ends, and the attribute with the last one."""
    found: Siblings | None = vars(unwrapped(model)).get(ATTRIBUTE)
    if found is not None:
        found.references = [each for each in found.references if each() not in (None, sibling)]
        if not found.references:
            del vars(unwrapped(model))[ATTRIBUTE]
