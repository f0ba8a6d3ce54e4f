"""What parameters in 16 bits were rounded from, taken out of one partition and into the next."""

from __future__ import annotations

import torch

from ballast import _core
from ballast.wrapper.partition import Partition
from ballast.wrapper.units import Member

Parts = list[tuple[int, torch.Tensor]]  # of a parameter, in fp32: the first element, and the numbers


class Masters:
    """Of what is trained: a rank has its own parts, and one whole parameter at a time. All ranks do all of this together."""

    def __init__(self, partition: Partition):
        self._parts: dict[int, Parts] = {id(member.parameter): [] for member in partition.members if _has_master(member)}
        if self._parts:
            partition.look_at_parts(lambda part: self._keep(partition.member_of(part), part))

    def _keep(self, member: Member, part: _core.StatePart) -> None:
        if id(member.parameter) in self._parts:
            values = torch.empty(part.count, dtype=torch.float32)
            _as_part(values).copy_from(part)
            self._parts[id(member.parameter)].append((part.first, values))

    def give(self, partition: Partition) -> None:
        """Before moments are, which become zero."""
        known = [member.parameter for member in partition.members if id(member.parameter) in self._parts]
        own = {id(parameter): self._own_parts(parameter, partition) for parameter in known}

        def change(part: _core.StatePart) -> None:
            for first, values in own.get(id(partition.member_of(part).parameter), []):
                if first <= part.first < first + len(values):
                    part.copy_from(_as_part(values[part.first - first :][: part.count]))

        if known:
            partition.change_parts(change, partition.steps, lambda: None)

    def _own_parts(self, parameter: torch.Tensor, partition: Partition) -> Parts:
        """Of another partition. Zeros below zero change nothing that they are added to, zeros above it would."""
        whole = torch.full((parameter.numel(),), -0.0)
        for first, values in self._parts.pop(id(parameter)):
            whole[first : first + len(values)] = values
        whole = partition.sum_of_shared(whole)
        return [(first, whole[first : first + count].clone()) for first, count in partition.parts(parameter)]


def _has_master(member: Member) -> bool:
    return bool(member.parameter.dtype != torch.float32)


def _as_part(values: torch.Tensor) -> _core.StatePart:
    return _core.StatePart(
        dtype=_core.DType.fp32, parameter=values.data_ptr(), momentum=0, variance=0, count=len(values)
    )
