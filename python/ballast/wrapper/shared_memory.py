"""Refuse parameters that share memory: each gets memory of its own, and a write to one would no longer change the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from ballast import _core
from ballast.checks import fail
from ballast.wrapper.deferred_init import is_on_meta
from ballast.wrapper.managed_parameter import managed
from ballast.wrapper.units import Member, has_foreign_class
from ballast.wrapper.unwrap import named_parameters

Named = tuple[str, torch.Tensor]


def require_own_memory(members: Iterable[Member], model: torch.nn.Module | None) -> None:
    """Refuse a member that has elements of another parameter, of the model or among the members. Parameters may be parts of
    one tensor, as cuDNN's are."""
    mine = {id(member.parameter): (member.name, member.parameter) for member in members}
    others = () if model is None else ((name, each) for name, each in named_parameters(model) if id(each) not in mine)
    known = [(name, each) for name, each in chain(mine.values(), others) if _has_memory(each)]
    for group in _that_overlap(known):
        pair = _with_a_common_element(group)
        if pair is not None and any(id(each) in mine for _, each in pair):
            names = " and ".join(name for name, _ in pair)
            problem = _core.Problem(
                what="cannot partition parameters that share memory: each gets memory of its own, so they would come apart",
                where=f"parameters {names}",
                needed="one Parameter in both places: module.weight = other.weight, without .data",
                remedy="To begin with the same values only, copy them: module.weight.data = other.weight.data.clone().",
            )
            fail("unsupported", problem)


def _has_memory(parameter: torch.Tensor) -> bool:
    """Return whether torch has the values in memory that a parameter of torch describes."""
    if managed(parameter) is not None or is_on_meta(parameter) or has_foreign_class(parameter):
        return False
    return bool(parameter.layout == torch.strided and parameter.numel() > 0)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return int((last + 1) * tensor.element_size())


def _that_overlap(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    """Yield the tensors between whose first and last elements are elements of others, in groups."""
    ordered = sorted(((str(each.device), each.data_ptr(), name, each) for name, each in tensors), key=lambda item: item[:2])
    group: list[Named] = []
    device, end = "", 0
    for where, begin, name, each in ordered:
        if where != device or begin >= end:
            if len(group) > 1:
                yield group
            group, device, end = [], where, 0
        group.append((name, each))
        end = max(end, begin + _extent(each))
    if len(group) > 1:
        yield group


def _with_a_common_element(group: list[Named]) -> list[Named] | None:
    """Return two of these tensors that share a byte, if there are two. They are ordered by address."""
    for before, after in zip(group, group[1:]):
        if before[1].is_contiguous() and after[1].data_ptr() < before[1].data_ptr() + before[1].nbytes:
            return [before, after]  # the first element of this one
    begin = group[0][1].data_ptr()
    end = max(each.data_ptr() + _extent(each) for _, each in group)
    owners = torch.full((end - begin,), -1, dtype=torch.int32, device="cpu")
    for number, (name, each) in enumerate(group):
        width = each.element_size()
        strides = [stride * width for stride in each.stride()]
        bytes_of_it = owners.as_strided((*each.shape, width), (*strides, 1), each.data_ptr() - begin)
        if (owner := int(bytes_of_it.max())) >= 0:
            return [group[owner], (name, each)]
        bytes_of_it.fill_(number)
    return None
