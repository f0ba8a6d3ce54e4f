"""Parameters of a unit in memory that is lent: other units' numbers are there next."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from ballast._torch_compat import storage_address, users_of_storage
from ballast.wrapper.units import Member

log = logging.getLogger("ballast")


class GatheredViews:
    """Knows who else looks at that memory."""

    def __init__(self, members: Sequence[Member], tensors: Sequence[torch.Tensor]):
        self.tensors = tensors
        self._members = members
        self._storages = [storage_address(tensor.untyped_storage()) for tensor in tensors]
        self._users = [users_of_storage(storage) for storage in self._storages]  # these tensors

    def warn_of_views(self, said: set[Member]) -> None:
        """That are still there when parameters are put away: whoever goes on with one computes with other numbers. It may be
        that nobody does, so this is no error. Once for each parameter."""
        for member in self._viewed():
            if member in said:
                continue
            said.add(member)
            log.warning(
                "a view of parameter %s is still there after its module was released: from now on it shows the values of other "
                "modules. Take it from the parameter (weight.t()) where it is used, and drop it after that.",
                member.name,
            )

    def _viewed(self) -> Iterator[Member]:
        for member, storage, users in zip(self._members, self._storages, self._users):
            if users_of_storage(storage) > users:
                yield member
