"""The casts in the cache of torch.autocast(). It keeps a cast of each parameter until the outermost autocast block ends, so
that all uses of the parameter in the block share one cast, and their gradients are summed in its format. In stage 3 the cache
would hold all parameters of the model. Ballast leaves the casts there, and frees their memory while their unit is released."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from sys import getrefcount

import torch

from ballast._torch_compat import references_to, storage_address, users_of_storage


class CachedCasts:
    """The casts of one training. No other tensor than a cached cast loses its memory: a cast that anything else refers to is
    left alone."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, torch.Tensor]] = []  # of the open unit: the number of the member, and the cast
        self.are_evaluated = False  # the call of the model that began last is in torch.no_grad()
        self._emptied: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by unit

    def add(self, member: int, cast: torch.Tensor) -> None:
        """Note a cast of a member of the open unit, which may be in the cache. Inside of an operator torch does not tell
        whether it is."""
        if torch.is_autocast_cache_enabled() and all(cast is not other for _, other in self._seen):
            self._seen.append((member, cast))

    def fill(self, unit: int, values: Sequence[torch.Tensor]) -> None:
        """Give the casts of a unit that opens their values again, if the cache still has them."""
        for member, cast in self._emptied.pop(unit, ()):
            if references_to(cast) > 1:
                cast.untyped_storage().resize_(cast.nbytes)
                cast.data.copy_(values[member])  # autograd does not count this write
                self._seen.append((member, cast))

    def empty(self, unit: int) -> None:
        """Free the memory of the casts of a unit that is released: of those to which only the cache and this object refer.
        An evaluation has no gradients, so its casts need not be the same ones later."""
        if self.are_evaluated and not torch.is_grad_enabled():
            torch.clear_autocast_cache()
        seen, self._seen = self._seen, []
        while seen:
            member, cast = seen.pop()
            is_only_cached = references_to(cast) == 2 and _references_in_python(cast) == _references_of_a_variable()
            if is_only_cached and _users_of_storage(cast) == _users_of_own_storage():
                cast.untyped_storage().resize_(0)
                self._emptied.setdefault(unit, []).append((member, cast))

    def forget(self) -> None:
        """Forget all casts, in the cache too: parameters are about to be used without their units being opened."""
        if any(references_to(cast) > 1 for casts in self._emptied.values() for _, cast in casts):
            torch.clear_autocast_cache()
        self._seen, self._emptied = [], {}


def _references_in_python(tensor: torch.Tensor) -> int:
    return getrefcount(tensor)


def _users_of_storage(tensor: torch.Tensor) -> int:
    return users_of_storage(storage_address(tensor.untyped_storage()))


# Versions of Python and torch count differently, so these are measured.


@cache
def _references_of_a_variable() -> int:
    """Return the references in Python to a tensor that is in one variable and in one place in torch."""
    holder, tensor = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    holder.grad = tensor
    return _references_in_python(tensor)


@cache
def _users_of_own_storage() -> int:
    """Return the users of a storage that only one tensor has."""
    return _users_of_storage(torch.zeros(1, device="cpu"))
