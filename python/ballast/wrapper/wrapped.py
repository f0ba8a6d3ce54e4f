"""The optimizer and the model that were given to `ballast.wrap()`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from ballast.wrapper import preconditions
from ballast.wrapper.units import names_of


class Wrapped:
    """Refers to both weakly: the optimizer owns the session, and the session owns this object."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None):
        self._optimizer = weakref.ref(optimizer)
        self._model = None if model is None else weakref.ref(model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def optimizer_if_alive(self) -> torch.optim.Optimizer | None:
        return self._optimizer()

    @property
    def model(self) -> torch.nn.Module | None:
        """The model; None if there was none, or if it is gone."""
        return None if self._model is None else self._model()

    @property
    def required_model(self) -> torch.nn.Module:
        return preconditions.require_model(self.model)

    def parameters(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        """Yield each parameter after the number of its group."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter

    def trained(self) -> list[tuple[int, torch.nn.Parameter]]:
        return [(number, each) for number, each in self.parameters() if each.requires_grad]

    def names(self) -> dict[int, str]:
        return names_of(self.optimizer.param_groups, self.model)
