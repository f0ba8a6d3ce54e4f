"""Below stage 3: parameters lie in the library's memory, whole, where torch sees each update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ballast import _core
from ballast.checks import fail
from ballast.wrapper.hidden import Hidden
from ballast.wrapper.memory import views_in
from ballast.wrapper.units import Member, UnitOfMembers


class WholeParameters:
    """Every parameter in its place. Owners may write to it, or put others there: that is noticed."""

    def __init__(self, core: _core.Training, units: Sequence[UnitOfMembers]):
        self._core = core
        self._units = units
        self._members = [member for unit in units for member in unit.members]
        self._hidden: Hidden | None = None
        self._take_places()

    def _take_places(self) -> None:
        self._places = [
            view
            for number, unit in enumerate(self._units)
            for view in views_in(
                self._core.whole_parameters(number), unit, self._core.tensor_begins(number), unit.members
            )
        ]
        self._versions = []
        for member, place in zip(self._members, self._places):
            member.parameter.data = place
            self._versions.append(member.parameter._version)

    def make_room(self) -> None:
        """For gradients there is always some."""

    def enter(self, module: torch.nn.Module) -> None:
        """They are always there."""

    def after_step(self) -> None:
        self._core.finish()

    def require_hideable(self, parameters: bool) -> None:
        """They always are."""

    def require_put_away(self, what: str) -> None:
        """Nothing is gathered."""

    def hide(self) -> None:
        """Their memory goes."""
        self._hidden = Hidden(self._members)
        self._places = []

    def show(self) -> None:
        """They have memory again, if it had gone."""
        if self._hidden is not None:
            self._hidden.end()
            self._hidden = None
            self._take_places()

    def release(self, together: bool, gathers: bool) -> None:
        """Parameters go back into torch's memory, from where they are there."""
        if self._hidden is not None:
            self._hidden.is_left = True
        for member, place in zip(self._members, self._places):
            if member.parameter.data_ptr() == place.data_ptr():
                member.parameter.data = member.parameter.data.clone()

    def take_over_changes(self) -> bool:
        """Whether somebody wrote to parameters; they are back in their places then."""
        changed = False
        for number, (member, place) in enumerate(zip(self._members, self._places)):
            parameter = member.parameter
            if parameter.data_ptr() != place.data_ptr():
                require_same_kind(member, place)
                place.copy_(parameter.data)
                parameter.data = place
                changed = True
            if parameter._version != self._versions[number]:
                self._versions[number] = parameter._version
                changed = True
        return changed


def require_same_kind(member: Member, place: torch.Tensor) -> None:
    """Refuses what cannot be copied back."""
    parameter = member.parameter
    if (parameter.dtype, parameter.device, parameter.shape) == (place.dtype, place.device, place.shape):
        return
    fail(
        "unsupported",
        _core.Problem(
            what="a parameter has become another one since training began",
            where=f"parameter {member.name}",
            needed=f"{place.dtype} on {place.device}, shape {tuple(place.shape)}",
            available=f"{parameter.dtype} on {parameter.device}, shape {tuple(parameter.shape)}",
            remedy="Move and cast the model before training begins.",
        ),
    )
