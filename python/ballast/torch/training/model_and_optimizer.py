"""The optimizer and the model that were given to `ballast.wrap()`, and the other wrapped optimizers of the model, each of which
trains parameters of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.checks import refuse_order
from ballast.torch.calls.hooks import trainer_of
from ballast.torch.parameters.units import names_of
from ballast.torch.tensor_names import named_parameters, unwrapped
from ballast.torch.training import preconditions
from ballast.torch.training.use_agreement import UseAgreement
from ballast.wrap_options import WrapOptions


class OwnParameters:
    """Remembers the parameter in each place of a model. Training may begin inside of a functional call, which has other tensors
    in these places."""

    def __init__(self, model: torch.nn.Module | None):
        self._of_place: dict[str, weakref.ref[torch.Tensor]] = {}
        self._remember(model)

    def _remember(self, model: torch.nn.Module | None) -> None:
        self._of_place = {place: weakref.ref(each) for _, _, place, each in _places(model)}

    @contextmanager
    def in_their_places(self, model: torch.nn.Module | None, is_trained: Callable[[torch.Tensor], bool]) -> Iterator[None]:
        """Put the model's own parameters into their places, and the replacements back at the end of the block. Refuse a new
        Parameter, which stays, in the place of one that the optimizer still trains."""
        places = [*_places(model)]
        there = {id(each) for _, _, _, each in places}
        replaced: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        try:
            for module, name, place, each in places:
                known = self._of_place.get(place)
                own = None if known is None else known()
                if not isinstance(each, torch.nn.Parameter):
                    if own is None:
                        _refuse(place, "functional_call() has replaced a parameter that the model did not have in wrap()")
                    replaced.append((module, name, each))
                    module._parameters[name] = own
                elif own is not None and id(own) not in there and is_trained(own) and not is_trained(each):
                    _refuse(place, "the model has another Parameter in its place")
            self._remember(model)
            yield
        finally:
            for module, name, each in replaced:
                module._parameters[name] = each


def _places(model: torch.nn.Module | None) -> Iterator[tuple[torch.nn.Module, str, str, torch.Tensor]]:
    """Yield each module with the name of a parameter in it, the name in the model, and the tensor that is there."""
    for path, module in () if model is None else model.named_modules():
        for name, each in module._parameters.items():
            if each is not None:
                yield module, name, f"{path}.{name}" if path else name, each


def _refuse(place: str, why: str) -> None:
    refuse_order(
        f"cannot begin to train a parameter: {why}",
        where=f"parameter {place}",
        needed="a call of the model with its own parameters, or ballast.gather(model), before functional_call(); or an "
        "optimizer of the parameters that the model has",
    )


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
        self.agreement = UseAgreement()  # between ranks in stage 3

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


def agreement_of(model: torch.nn.Module) -> UseAgreement | None:
    """Return the agreement on uses of a model that has wrapped optimizers."""
    found: Siblings | None = vars(unwrapped(model)).get(ATTRIBUTE)
    return None if found is None else found.agreement


def join(model: torch.nn.Module, sibling: Sibling) -> None:
    found: Siblings = vars(unwrapped(model)).setdefault(ATTRIBUTE, Siblings())
    found.references.append(weakref.ref(sibling))
    found.agreement.model = weakref.ref(unwrapped(model))


def leave(model: torch.nn.Module, sibling: Sibling) -> None:
    """Remove one that ends, and the attribute with the last one."""
    found: Siblings | None = vars(unwrapped(model)).get(ATTRIBUTE)
    if found is not None:
        found.references = [each for each in found.references if each() not in (None, sibling)]
        if not found.references:
            del vars(unwrapped(model))[ATTRIBUTE]


class Wrapped:
    """Refers to both weakly: the optimizer owns the session, and the session owns this object."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: WrapOptions, call: object):
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

    def agreement(self) -> UseAgreement | None:
        return None if (model := self.model) is None else agreement_of(model)

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
