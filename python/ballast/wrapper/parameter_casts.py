"""Casts of parameters, which torch.autocast() makes and autograd saves: backward casts the gathered parameter again instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ballast._torch_compat import base_of
from ballast.wrapper.units import Member

_CAST = "ToCopyBackward0"
# Views of all elements. Of such a view of a parameter, a cast has the parameter's order in memory.
_VIEWS_OF_ALL = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "MovedimBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0"),
}
_MOST_VIEWS = 8  # of a view; a parameter is at the end of a short chain


class CastPlace(NamedTuple):
    """The place of a view in a cast of a parameter."""

    key: object  # of the gatherer whose unit it is
    unit: int
    member: int  # of the unit
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the cast's first
    updates: int  # that the gatherer had counted


def place_in_cast(tensor: torch.Tensor, members: Mapping[int, Member], key: object, updates: int) -> CastPlace | None:
    """Return the place of a tensor that is a cast of one of these parameters (by id), or a view of such a cast; None if it
    is not known to be one. `key` is that of the parameters' gatherer, which has counted this many `updates`.

    The graph of autograd shows it, so a cast of a frozen parameter is not found."""
    cast = base_of(tensor)
    if cast.grad_fn is None or cast.grad_fn.name() != _CAST:
        return None
    if tensor.dtype != cast.dtype or cast._version != 0:  # other bits are seen, or were written
        return None
    parameter = _source_of(cast.grad_fn)
    member = members.get(id(parameter))
    if member is None or parameter is None or not _has_all(cast, parameter):
        return None
    return CastPlace(
        key, member.unit, member.tensor, cast.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), updates
    )


def _source_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose elements, all of them, this node casts."""
    for _ in range(_MOST_VIEWS):
        node = node.next_functions[0][0]
        if node is None:
            return None
        variable: torch.Tensor | None = getattr(node, "variable", None)
        if variable is not None or node.name() not in _VIEWS_OF_ALL:
            return variable
    return None


def _has_all(cast: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the cast has the elements of the parameter in the order in which they are in memory."""
    dense = sorted(zip(cast.stride(), cast.shape))
    expected = 1
    for stride, size in dense:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return bool(cast.numel() == parameter.numel() and cast.storage_offset() == 0 and cast.device == parameter.device)
