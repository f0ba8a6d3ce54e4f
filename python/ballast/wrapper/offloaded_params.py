"""Full parameters while their training is off its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from ballast.checks import refuse_order
from ballast.connecting import Group
from ballast.wrapper.casting import require_no_cast
from ballast.wrapper.managed_parameter import ManagedParameter
from ballast.wrapper.stored_tensor import StoredTensor
from ballast.wrapper.units import Member


class OffloadedParameters:
    """The owner of offloaded parameters. It refuses each use, and says what to do."""

    def __init__(self, members: Sequence[Member], managed: Sequence[ManagedParameter], group: Group):
        self.group = group
        self.is_gone = False  # the training has ended, and the values are lost
        self._names = {id(member.parameter): member.name for member in members}
        for each in managed:
            each.offload(self)

    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> NoReturn:
        require_no_cast(operation, self._names[id(parameters[0])], why="training has begun, and it is off the device")
        self._refuse(self._names[id(parameters[0])])

    def begin(self) -> NoReturn:
        self._refuse(next(iter(self._names.values())))

    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> NoReturn:
        self._refuse(self._names[id(parameters[0])])

    def write(self, values: Mapping[torch.nn.Parameter, StoredTensor]) -> NoReturn:
        self.begin()

    def _refuse(self, name: str) -> NoReturn:
        if self.is_gone:
            refuse_order(
                "cannot use a parameter: its optimizer has gone while it was off the device",
                where=f"parameter {name}",
                needed="optimizer.close() on all ranks, before it is deleted",
            )
        refuse_order(
            "cannot use a parameter: its training is off the device",
            where=f"parameter {name}",
            needed="optimizer.reload(), on all ranks; or optimizer.offload(parameters=False) before",
        )
