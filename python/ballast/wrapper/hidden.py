"""Parameters that are kept whole, while their training is off its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from ballast.checks import refuse_order
from ballast.wrapper.casting import require_no_cast
from ballast.wrapper.ungathered import Ungathered, nothing_like
from ballast.wrapper.units import Member


class Hidden:
    """Stands where a window would be: whoever uses a parameter is told what to do."""

    def __init__(self, members: Sequence[Member]):
        self._kinds = [(member, type(member.parameter)) for member in members]
        self.is_left = False  # by its training: the numbers are gone
        self._names = {id(member.parameter): member.name for member in members}
        for member in members:
            parameter = member.parameter
            parameter.data = nothing_like(parameter, parameter.device)
            parameter.__class__ = Ungathered
            parameter.ballast_window = self

    def end(self) -> None:
        for member, kind in self._kinds:
            member.parameter.__class__ = kind
            del member.parameter.ballast_window

    def gathering(self, parameters: Sequence[torch.Tensor], use: str) -> NoReturn:
        require_no_cast(use, self._names[id(parameters[0])], why="training has begun, and it is off the device")
        self._refuse(self._names[id(parameters[0])])

    def begin(self) -> NoReturn:
        self._refuse(next(iter(self._names.values())))

    def write(self, values: object) -> NoReturn:
        self.begin()

    def _refuse(self, name: str) -> NoReturn:
        if self.is_left:
            refuse_order(
                "a parameter was used whose optimizer has gone while it was off the device",
                where=f"parameter {name}",
                needed="optimizer.close() on all ranks, before it is deleted",
            )
        refuse_order(
            "a parameter was used while its training is off the device",
            where=f"parameter {name}",
            needed="optimizer.reload(), on all ranks; or optimizer.offload(parameters=False) before",
        )
