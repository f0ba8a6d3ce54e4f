"""A model's own parameters, while torch.func.functional_call() has other tensors in their places."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ballast.checks import refuse_order


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
