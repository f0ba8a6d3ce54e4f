"""The class that a parameter has while it may still be updated or gathered: the first function of torch that uses it waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch

from ballast._torch_compat import tree_leaves, without_torch_function
from ballast.wrapper.ungathered import needs_no_values


class AwaitedParameter(torch.nn.Parameter):
    """A change of its class makes a parameter one, and an ordinary one again."""

    ballast_wait: Callable[[], None]  # returns when this is an ordinary parameter again

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.ballast_wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self.ballast_wait()
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if needs_no_values(func):
            with without_torch_function():
                return func(*args, **options)
        for each in tree_leaves((args, options)):
            if type(each) is AwaitedParameter:
                each.ballast_wait()
        return func(*args, **options)


def make_awaited(parameter: torch.nn.Parameter, wait: Callable[[], None]) -> None:
    """Let the next use of the parameter's values call `wait`, which calls make_ordinary()."""
    vars(parameter)["ballast_wait"] = wait
    parameter.__class__ = AwaitedParameter


def make_ordinary(parameter: torch.nn.Parameter, kind: type[torch.nn.Parameter]) -> None:
    parameter.__class__ = kind
    del vars(parameter)["ballast_wait"]
