"""The optimizer and the model that were given to `ballast.wrap()`, and the other wrapped optimizers of the model.

Each of these trains parameters of its own, and all of them keep parameters in the same way.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.checks import refuse, refuse_order
from ballast.errors import UsageError
from ballast.torch.calls.hooks import CallReceiver, receiver_of
from ballast.torch.parameters.units import named_parameters, names_of, places_in, required, unwrapped
from ballast.torch.training.use_agreement import UseAgreement
from ballast.wrap_options import WrapOptions


class OwnParameters:
    """Remembers the parameter in each place of a model. Training may begin inside of a functional call, which has other tensors
    in these places."""

    def __init__(self, model: torch.nn.Module | None):
        self._by_place: dict[str, weakref.ref[torch.Tensor]] = {}
        self._remember(model)

    def _remember(self, model: torch.nn.Module | None) -> None:
        self._by_place = {place: weakref.ref(each) for _, _, place, each in places_in(model)}

    @contextmanager
    def in_their_places(self, model: torch.nn.Module | None, is_trained: Callable[[torch.Tensor], bool]) -> Iterator[None]:
        """Put the model's own parameters into their places, and the replacements back at the end of the block. Refuse a new
        Parameter, which stays, in the place of one that the optimizer still trains."""
        places = [*places_in(model)]
        there = {id(each) for _, _, _, each in places}
        replaced: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        try:
            for module, name, place, each in places:
                known = self._by_place.get(place)
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


def _refuse(place: str, why: str) -> None:
    refuse_order(
        f"cannot begin to train a parameter: {why}",
        where=f"parameter {place}",
        needed="a call of the model with its own parameters, or ballast.gather(model), before functional_call(); or an "
        "optimizer of the parameters that the model has",
    )


ATTRIBUTE = "ballast_siblings"  # the attribute of a model with its Siblings


class Siblings:
    """The attribute of a model that has wrapped optimizers. In a copy or a pickle of the model it is empty."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[ModelAndOptimizer]] = []
        self.exchanges = _core.ExchangeOrder()  # the order of exchanges between GPUs
        self.agreement: UseAgreement | None = None  # the agreement of ranks in stage 3

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()


def _siblings_of(model: torch.nn.Module | None) -> Siblings | None:
    return None if model is None else vars(unwrapped(model)).get(ATTRIBUTE)


def optimizers_of(model: torch.nn.Module | None) -> list[ModelAndOptimizer]:
    """Return the wrapped optimizers of the model, in the order in which they were wrapped."""
    found = _siblings_of(model)
    there = [] if found is None else [sibling for each in found.references if (sibling := each()) is not None]
    return [sibling for sibling in there if sibling.optimizer_if_alive is not None]


class ModelAndOptimizer:
    """Refers to both weakly: the optimizer owns the training, and the training owns this object."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: WrapOptions, call: object):
        self._optimizer = weakref.ref(optimizer)
        self._model = None if model is None else weakref.ref(model)
        self._own = OwnParameters(model)
        self.options = options  # the options as they were given
        self.call = call  # the call of wrap(), the same for the optimizers of a list
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
        return required(self.model, "train in stage 3 without a model", "stage=3")

    def parameters(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        """Yield each parameter after the number of its group."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the optimizer, and those of the model."""
        model = self.model
        return [*(each for _, each in self.parameters()), *(() if model is None else model.parameters())]

    def trained(self) -> list[tuple[int, torch.nn.Parameter]]:
        with without_torch_function():  # it would be called for each of thousands of sharded parameters
            groups = enumerate(self.optimizer.param_groups)
            return [(number, each) for number, group in groups for each in group["params"] if each.requires_grad]

    def names(self) -> dict[int, str]:
        return names_of(self.optimizer.param_groups, self.model)

    def own_parameters(self) -> AbstractContextManager[None]:
        """Put the model's own parameters into their places inside the block, where a functional call has replaced them."""
        mine = {id(parameter) for _, parameter in self.trained()}
        return self._own.in_their_places(self.model, lambda each: id(each) in mine)

    # --- The other optimizers of the model ---

    def join(self) -> None:
        """Let the other optimizers of the model know this one."""
        if (model := self.model) is not None:
            found: Siblings = vars(unwrapped(model)).setdefault(ATTRIBUTE, Siblings())
            found.references.append(weakref.ref(self))

    def leave(self) -> None:
        """Remove this one, which ends, and the attribute of the model with the last one."""
        if (model := self.model) is not None and (found := _siblings_of(model)) is not None:
            found.references = [each for each in found.references if each() not in (None, self)]
            if not found.references:
                del vars(unwrapped(model))[ATTRIBUTE]

    def share_exchanges(self, options: _core.TrainingOptions) -> None:
        """Let the training of an optimizer that has joined exchange in one order with those of the others."""
        if (found := _siblings_of(self.model)) is not None:
            options.exchanges = found.exchanges

    def agreement(self) -> UseAgreement | None:
        """Return the agreement on uses of a model that has wrapped optimizers."""
        if (model := self.model) is None or (found := _siblings_of(model)) is None:
            return None
        found.agreement = found.agreement or UseAgreement(unwrapped(model))
        return found.agreement

    def siblings(self) -> list[ModelAndOptimizer]:
        return [each for each in optimizers_of(self.model) if each is not self]

    def ids_of_siblings(self) -> set[int]:
        return {id(parameter) for sibling in self.siblings() for _, parameter in sibling.parameters()}

    @property
    def is_first(self) -> bool:
        """Whether this is the optimizer of the model that was wrapped first."""
        return optimizers_of(self.model)[:1] in ([], [self])

    def unaveraged(self) -> list[str]:
        """Return the names of the model's parameters that have gradients, and that no wrapped optimizer has."""
        if (model := self.model) is None:
            return []
        known = {id(parameter) for each in optimizers_of(model) for _, parameter in each.parameters()}
        with without_torch_function():
            return [
                name
                for name, parameter in named_parameters(model)
                if parameter.requires_grad and id(parameter) not in known and receiver_of(parameter) is None
            ]

    def keeps(self) -> Callable[[torch.Tensor], bool]:
        """Return the function that says whether a parameter of the model is this optimizer's to keep: its own ones are. Those
        that no optimizer has are kept by the one that was wrapped first."""
        own, other_ids, is_first = {id(parameter) for _, parameter in self.parameters()}, self.ids_of_siblings(), self.is_first

        def keep(parameter: torch.Tensor) -> bool:
            if id(parameter) in own:
                return True
            return is_first and id(parameter) not in other_ids and receiver_of(parameter) is None

        return keep

    def shards(self) -> Callable[[torch.Tensor], bool]:
        """Return the function that says whether stage 3 shards a parameter: those that this optimizer keeps, except for those
        that an optimizer which is not wrapped may train."""
        own, keeps = {id(parameter) for _, parameter in self.parameters()}, self.keeps()
        return lambda parameter: keeps(parameter) and (id(parameter) in own or not parameter.requires_grad)


# --- Conditions for several optimizers of one model ---


def require_shareable(given: ModelAndOptimizer, training: CallReceiver) -> None:
    """Refuse to wrap an optimizer with parameters that another one has, or with another optimizer of the model that it cannot
    train with."""
    what = "cannot wrap the optimizer"
    for is_last in (False, True):
        try:
            for sibling in given.siblings():
                _require_same_kind(what, given.options, sibling.options)
                _require_joint_runs(what, given, sibling)
            require_own(what, given, training, [parameter for _, parameter in given.parameters()])
            _require_no_other_model(what, given, training)
            return
        except UsageError:
            if is_last:
                raise
        gc.collect()  # a cycle of references may be all that keeps the other one


def require_own(what: str, given: ModelAndOptimizer, training: CallReceiver, mine: Collection[torch.nn.Parameter]) -> None:
    """Refuse parameters that another optimizer has, or keeps."""
    sibling_ids = given.ids_of_siblings()
    for parameter in mine:
        if id(parameter) in sibling_ids or receiver_of(parameter) not in (None, training):
            refuse(
                f"{what}: another wrapped optimizer trains its parameters",
                where=f"parameter {given.names()[id(parameter)]}",
                needed="one optimizer for each parameter",
                remedy="Call close() of the other one before.",
            )
    held = {number for sibling in given.siblings() for number in sibling.sharded_ids}
    for parameter in mine:
        if id(parameter) in held:
            refuse(
                f"{what}: training has begun, and another optimizer of the model keeps shards of its parameters",
                where=f"parameter {given.names()[id(parameter)]}",
                needed="all optimizers of a model before training begins, such as ballast.wrap([one, other], model, stage=3)",
                remedy="Or call ballast.save() and close() of the other one, and wrap() both.",
            )


def _require_same_kind(what: str, mine: WrapOptions, theirs: WrapOptions) -> None:
    """Refuse options with which two optimizers cannot train one model."""
    what = f"{what}: another wrapped optimizer trains its model"
    if None in (mine.stage, theirs.stage):
        refuse(f'{what}, and stage="auto" chooses for one alone', needed="the same stage for both")
    if (mine.stage == 3) != (theirs.stage == 3):
        refuse(
            f"{what} in stage {theirs.stage}, and not in stage {mine.stage}",
            needed="stage 3 for all optimizers of a model, or for none",
            remedy="Or call close() of the other one before.",
        )
    if mine.outer is not None or theirs.outer is not None:
        refuse(f"{what}, and outer= exchanges the parameters of one", needed="one optimizer for all of a model's parameters")
    if mine.activations is not None:
        refuse(f"{what}, and activations= is of the one that is wrapped first", needed="activations= there, or a list of both")


def _require_joint_runs(what: str, given: ModelAndOptimizer, sibling: ModelAndOptimizer) -> None:
    """Refuse runs that are not resumed together: those of optimizers that are not wrapped in one call."""
    if (given.options.run.name or sibling.options.run.name) and given.call is not sibling.call:
        refuse(
            f"{what}: another wrapped optimizer trains its model, and drives commit the steps of each on its own: after a "
            "failure, run= could resume between two of them",
            needed="all optimizers in one call, such as ballast.wrap([one, other], model, run=...)",
        )


def _require_no_other_model(what: str, given: ModelAndOptimizer, training: CallReceiver) -> None:
    """Refuse an optimizer that trains a part of this model, or a model that this one is a part of, if one of them is in stage
    3, which gathers whole models."""
    sibling_ids, model = given.ids_of_siblings(), given.model
    for name, parameter in () if model is None else named_parameters(model):
        other = None if id(parameter) in sibling_ids else receiver_of(parameter)
        if other not in (None, training) and 3 in (training.stage, other.stage):
            refuse(
                f"{what}: another wrapped optimizer trains its model, as a part of another one",
                where=f"parameter {name}",
                needed="the same model in each wrap()",
                remedy="Or call close() of the other one before.",
            )
