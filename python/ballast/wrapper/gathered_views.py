"""Views of a unit's parameters in acquired memory, which holds the values of other units next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from ballast._torch_compat import storage_address, users_of_storage
from ballast.wrapper.units import Member

log = logging.getLogger("ballast")

_MOST_PLACES = 1000  # to remember: slices of changing sizes would add up


class Place(NamedTuple):
    """The place of a view of a parameter."""

    key: object  # of the gatherer whose unit it is: each optimizer of a model has one
    unit: int
    member: int  # of the unit
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the member's first
    is_whole: bool  # it is the parameter as it is
    updates: int  # that the gatherer had counted


class GatheredViews:
    """The views, the places in them, and whether tensors other than these views share the memory. In the place of some views
    there are copies, whose memory keeps its values. So tensors that share it may stay."""

    def __init__(
        self, key: object, members: Sequence[Member], tensors: Sequence[torch.Tensor], copies: Collection[Member] = ()
    ):
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self._key = key
        self._members = members
        views = [(member, tensor) for member, tensor in zip(members, tensors) if member not in copies]
        storages = [(member, storage_address(tensor.untyped_storage())) for member, tensor in views]
        self._users = [(member, storage, users_of_storage(storage)) for member, storage in storages]  # with these tensors alone
        self._places: dict[tuple[object, ...], Place] = {}  # that were found before
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by member, until the unit is released
        self.has_copies = bool(copies)
        self.dtype = tensors[0].dtype if tensors else None
        filled = [tensor for _, tensor in views if tensor.numel() > 0]
        self.begin = min((tensor.data_ptr() for tensor in filled), default=0)  # addresses
        self.end = max((tensor.data_ptr() + tensor.nbytes for tensor in filled), default=0)

    def with_copies(self, copies: Collection[Member]) -> GatheredViews:
        """Return these views, with copies of some members as they are now."""
        tensors = [tensor.clone() if member in copies else tensor for member, tensor in zip(self._members, self.tensors)]
        return GatheredViews(self._key, self._members, tensors, copies)

    def place_of(self, tensor: torch.Tensor, address: int, updates: int) -> Place | None:
        """Return the place of a tensor whose first element is at this address; None if it is no view of a member. `updates` is
        their number now."""
        key = (address, tensor.shape, tensor.stride(), tensor.dtype)
        place = self._places.get(key)
        if place is None:
            place = self._find(tensor, address, updates)
            if place is not None:
                if len(self._places) >= _MOST_PLACES:
                    self._places.clear()
                self._places[key] = place
        elif place.updates != updates:
            place = self._places[key] = Place(*place[:-1], updates)
        return place

    def _find(self, tensor: torch.Tensor, address: int, updates: int) -> Place | None:
        for number, (member, view) in enumerate(zip(self._members, self.tensors)):
            offset = address - view.data_ptr()
            if 0 <= offset < view.nbytes and tensor.dtype == view.dtype:
                size, stride = tuple(tensor.shape), tensor.stride()
                is_whole = offset == 0 and (size, stride) == (tuple(view.shape), view.stride())
                return Place(self._key, member.unit, number, size, stride, offset // view.element_size(), is_whole, updates)
        return None

    def cast_of(self, member: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a cast of a member. It is made once while the unit is open."""
        cast = self._casts.get((member, dtype))
        if cast is None:
            cast = self._casts[member, dtype] = self.tensors[member].to(dtype)
        return cast

    def forget_casts(self) -> None:
        self._casts.clear()

    def warn_of_views(self, warned: set[Member]) -> None:
        """Warn of views that outlive the release of their parameter: they show the values of other units from then on.
        It is no error, because they may be unused. Each parameter is named once."""
        for member, storage, users in self._users:
            if users_of_storage(storage) > users and member not in warned:
                warned.add(member)
                log.warning(
                    "a view of parameter %s is still there after its module was released: from now on it shows the values of "
                    "other modules. Take it from the parameter (weight.t()) where it is used, and drop it after that.",
                    member.name,
                )


NO_VIEWS = GatheredViews(None, (), ())
