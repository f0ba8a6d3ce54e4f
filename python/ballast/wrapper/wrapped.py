"""The optimizer and the model that were given to `ballast.wrap()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.wrapper import preconditions
from ballast.wrapper.hooks import trainer_of
from ballast.wrapper.options import WrapOptions
from ballast.wrapper.own_parameters import OwnParameters
from ballast.wrapper.siblings import Sibling, join, leave, optimizers_of, share_exchanges
from ballast.wrapper.units import names_of
from ballast.wrapper.unwrap import named_parameters


class Wrapped:
    """Refers to both weakly: the optimizer owns the session, and the session owns this object."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: WrapOptions, call: object
    ):
        self._optimizer = weakref.ref(optimizer)
        self._model = None if model is None else weakref.ref(model)
        self._own = OwnParameters(model)
        self.options = options  # as they were given
        self.call = call  # of wrap(), the same for the optimizers of a list
        self.sharded_ids: frozenset[int] = frozenset()  # ids of the parameters of which stage 3 keeps shards

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
        with without_torch_function():  # it would be called for each of thousands of sharded parameters
            return [(number, each) for number, each in self.parameters() if each.requires_grad]

    def own_parameters(self) -> AbstractContextManager[None]:
        """Put the model's own parameters into their places inside the block, where a functional call has replaced them."""
        mine = {id(parameter) for _, parameter in self.trained()}
        return self._own.in_their_places(self.model, lambda each: id(each) in mine)

    # --- The other optimizers of the model ---

    def join(self) -> None:
        """Let the other optimizers of the model know this one."""
        if (model := self.model) is not None:
            join(model, self)

    def leave(self) -> None:
        if (model := self.model) is not None:
            leave(model, self)

    def share_exchanges(self, options: _core.TrainingOptions) -> None:
        if (model := self.model) is not None:
            share_exchanges(model, options)

    def siblings(self) -> list[Sibling]:
        """Return the other optimizers of the model, in the order in which they were wrapped."""
        return [each for each in self._optimizers() if each is not self]

    def _optimizers(self) -> list[Sibling]:
        return [] if (model := self.model) is None else optimizers_of(model)

    @property
    def is_first(self) -> bool:
        """Whether this is the optimizer of the model that was wrapped first."""
        return self._optimizers()[:1] in ([], [self])

    def unaveraged(self) -> list[str]:
        """Return the names of the model's parameters that have gradients, and that no wrapped optimizer has."""
        if (model := self.model) is None:
            return []
        known = {id(parameter) for each in self._optimizers() for _, parameter in each.parameters()}
        with without_torch_function():
            return [
                name
                for name, parameter in named_parameters(model)
                if parameter.requires_grad and id(parameter) not in known and trainer_of(parameter) is None
            ]

    def keeps(self) -> Callable[[torch.Tensor], bool]:
        """Return the function that says whether a parameter of the model is this optimizer's to keep: its own ones are. Those
        that no optimizer has are kept by the one that was wrapped first."""
        own = {id(parameter) for _, parameter in self.parameters()}
        of_others = {id(parameter) for sibling in self.siblings() for _, parameter in sibling.parameters()}
        is_first = self.is_first

        def keep(parameter: torch.Tensor) -> bool:
            if id(parameter) in own:
                return True
            return is_first and id(parameter) not in of_others and trainer_of(parameter) is None

        return keep

    def shards(self) -> Callable[[torch.Tensor], bool]:
        """Return the function that says whether stage 3 shards a parameter: those that this optimizer keeps, except for those
        that an optimizer which is not wrapped may train."""
        own, keeps = {id(parameter) for _, parameter in self.parameters()}, self.keeps()
        return lambda parameter: keeps(parameter) and (id(parameter) in own or not parameter.requires_grad)

    def names(self) -> dict[int, str]:
        return names_of(self.optimizer.param_groups, self.model)
