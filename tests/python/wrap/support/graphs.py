"""Uncommon uses of autograd: functions that other processes can find by name."""

from __future__ import annotations

from typing import Any

import ballast
import torch
import torch.utils.checkpoint
from python.wrap.support.keywords import keywords
from torch import nn


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Field(nn.Module):
    """A model that returns an energy and, if `in_forward` is set, the forces, as models of molecules do."""

    def __init__(self, in_forward: bool):
        super().__init__()
        torch.manual_seed(0)
        self.in_forward = in_forward
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        energy: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return energy

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        energy = self.energy(x)
        return energy, forces(energy, x) if self.in_forward else x


def forces(energy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(energy.float().sum(), x, create_graph=True)[0]


def penalized(penalty: str, **options: Any) -> torch.Tensor:
    """Return the losses of a training whose loss has gradients in it, and the parameters after it. With options, the
    optimizer is wrapped."""
    model = Field(in_forward=penalty == "in forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=penalty == "under autocast"):
            energy, found = model(batch())
        gradient = found if model.in_forward else forces(energy, found)
        loss = energy.square().mean() + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().reshape(1))
    with ballast.gather(model):
        return torch.cat([*losses, *(each.detach().flatten().clone() for each in model.parameters())])


def penalized_on_each_rank(rank: int, penalties: list[str]) -> list[torch.Tensor]:
    return [penalized(penalty, stage=3) for penalty in penalties]


def retained(*, autocast: bool = False, **options: Any) -> tuple[Field, Any, torch.Tensor]:
    """Return a model after a step, its optimizer, and a loss whose graph has not been used."""
    model = Field(in_forward=False)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(**options))
    model(batch())[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        energy, _ = model(batch())
    return model, optimizer, energy.float().square().mean()


def used(model: Field) -> list[nn.Parameter]:
    return [each for module in (model.first, model.second, model.last) for each in module.parameters()]


def gradients(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, used(model)))


def some_are_unused(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    named = {**dict(model.named_parameters()), "unused": model.unused.weight}
    found = torch.autograd.grad(loss, named, materialize_grads=True)
    assert list(found) == list(named)
    return list(found.values())


def gradients_of_gradients(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    first = torch.autograd.grad(loss, used(model), create_graph=True)
    sum(each.square().sum() for each in first).backward()
    return [each.detach() for each in first]


def of_some_parameters(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    loss.backward(inputs=[model.second.weight, model.last.bias])
    return []


BY_HAND = {each.__name__: each for each in (gradients, some_are_unused, gradients_of_gradients, of_some_parameters)}


def gradients_by_hand(kind: str, **options: Any) -> list[torch.Tensor]:
    """Return the gradients that a function computes in each of two steps, and the parameters after the steps."""
    model = Field(in_forward=False)
    model.unused = nn.Linear(2, 2)
    nn.init.ones_(model.unused.weight), nn.init.ones_(model.unused.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    found = []
    for _ in range(2):
        loss = model(batch())[0].square().mean()
        found += BY_HAND[kind](loss, model)
        if kind in ("gradients_of_gradients", "of_some_parameters"):
            optimizer.step()
            optimizer.zero_grad()
        model(batch())  # other units than those of the last backward pass are open
    with ballast.gather(model):
        return [*found, *(each.detach().clone() for each in model.parameters())]


class Recomputes(nn.Module):
    """A model that checkpoints a method, which uses parameters of its own."""

    def __init__(self, reentrant: bool, is_last: bool):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.is_last = reentrant, is_last
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale, self.weight = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4, 4))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.weight) if self.is_last else torch.tanh(self.first(x)) * self.scale.view(1, -1)
        x = torch.tanh(self.second(x))
        x = x * self.scale if self.is_last else x @ self.weight
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)
        result: torch.Tensor = x if self.is_last else self.last(x)
        return result


def recomputed(reentrant: bool, is_last: bool, **options: Any) -> list[torch.Tensor]:
    """Return the losses of three steps, and the parameters after them."""
    model = Recomputes(reentrant, is_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    losses = []
    for _ in range(3):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with ballast.gather(model):
        return [*losses, *(each.detach().clone() for each in model.parameters())]


def recomputed_on_each_rank(rank: int, cases: list[tuple[bool, bool]]) -> list[list[torch.Tensor]]:
    return [recomputed(*case, stage=3) for case in cases]
