"""Views of a unit's parameters in acquired memory, which holds the values of other units next."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from ballast._torch_compat import storage_address, users_of_storage
from ballast.wrapper.units import Member

log = logging.getLogger("ballast")


class GatheredViews:
    """Knows whether tensors other than these views share the memory."""

    def __init__(self, members: Sequence[Member], tensors: Sequence[torch.Tensor]):
        self.tensors = tensors
        self._members = members
        self._storages = [storage_address(tensor.untyped_storage()) for tensor in tensors]
        self._users = [users_of_storage(storage) for storage in self._storages]  # with these tensors alone

    def warn_of_views(self, warned: set[Member]) -> None:
        """Warn of views that outlive the release of their parameter: they show the values of other units from then on.
        It is no error, because they may be unused. Each parameter is named once."""
        for member in self._viewed():
            if member in warned:
                continue
            warned.add(member)
            log.warning(
                "a view of parameter %s is still there after its module was released: from now on it shows the values of other "
                "modules. Take it from the parameter (weight.t()) where it is used, and drop it after that.",
                member.name,
            )

    def _viewed(self) -> Iterator[Member]:
        for member, storage, users in zip(self._members, self._storages, self._users):
            if users_of_storage(storage) > users:
                yield member
