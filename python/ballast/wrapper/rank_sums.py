"""Numbers of each parameter that ranks add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ballast.connecting import Group
from ballast.wrapper.collectives import sum_in_fp32
from ballast.wrapper.units import Member


class RankSums:
    """The sums of all parameters lie in one tensor on the host, which takes one collective."""

    def __init__(self, sizes: Mapping[Member, Sequence[int]]):
        self._sizes = [size for of_member in sizes.values() for size in of_member]
        self._first = {}
        tensors = 0
        for member, of_member in sizes.items():
            self._first[member] = slice(tensors, tensors + len(of_member))
            tensors += len(of_member)
        self._total = torch.zeros(sum(self._sizes), dtype=torch.float32, device="cpu")

    def of(self, member: Member) -> Sequence[torch.Tensor]:
        """Return the tensors of a parameter, one for each of its sizes."""
        tensors: Sequence[torch.Tensor] = self._total.split(self._sizes)
        return tensors[self._first[member]]

    def add_up(self, ranks: Group | None) -> None:
        """Add the numbers of all ranks. They call it together; without a group there is nothing to add."""
        self._total = sum_in_fp32(ranks, self._total)
