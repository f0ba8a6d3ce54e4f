"""Below stage 3: parameters lie in the library's memory, whole, where torch sees each update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ballast import _core
from ballast.wrapper.hidden import Hidden
from ballast.wrapper.memory import views_in
from ballast.wrapper.units import Member, UnitOfMembers
from ballast.wrapper.writes import Slots, Snapshot, is_elsewhere, is_same_kind, require_same_kind


class WholeParameters:
    """Every parameter in its place. Owners may write to it, or put others there: that is noticed."""

    def __init__(
        self, model: Callable[[], torch.nn.Module | None], core: _core.Training, units: Sequence[UnitOfMembers]
    ):
        self._model = model
        self._core = core
        self._units = units
        self._members = [member for unit in units for member in unit.members]
        self._numbers = {id(member.parameter): number for number, member in enumerate(self._members)}
        self._watched: dict[int, Snapshot] = {}
        self._hidden: Hidden | None = None
        self._take_places()

    def _take_places(self) -> None:
        self._watched = {}
        self._places = [
            view
            for number, unit in enumerate(self._units)
            for view in views_in(
                self._core.whole_parameters(number), unit, self._core.tensor_begins(number), unit.members
            )
        ]
        self._versions: list[int | None] = []  # None: written to in a way that torch does not count
        for member, place in zip(self._members, self._places):
            member.parameter.data = place
            self._versions.append(member.parameter._version)

    def make_room(self) -> None:
        """For gradients there is always some."""

    def enter(self, module: torch.nn.Module) -> None:
        """They are always there."""

    def after_step(self) -> None:
        self._core.finish()
        self._watch([*self._watched])

    def require_hideable(self, parameters: bool) -> None:
        """They always are."""

    def require_put_away(self, what: str) -> None:
        """Nothing is gathered."""

    def hide(self) -> None:
        """Their memory goes."""
        self._hidden = Hidden(self._members)
        self._places, self._watched = [], {}

    def show(self) -> None:
        """They have memory again, if it had gone."""
        if self._hidden is not None:
            self._hidden.end()
            self._hidden = None
            self._take_places()

    def release(self, together: bool, gathers: bool) -> None:
        """Parameters go back into torch's memory, from where they are there."""
        self._watched = {}
        if self._hidden is not None:
            self._hidden.is_left = True
        for member, place in zip(self._members, self._places):
            if member.parameter.data_ptr() == place.data_ptr():
                member.parameter.data = member.parameter.data.clone()

    # --- Writes of their owner ---

    @contextmanager
    def gathered(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Watch these parameters: what is written to them inside the block is taken over before the next update, also
        what torch does not count. The ranks need not do this together."""
        slots = Slots(self._model(), parameters)
        numbers = [self._numbers[id(each)] for each in dict.fromkeys(parameters) if id(each) in self._numbers]
        mine = [number for number in numbers if number not in self._watched]  # an outer block watches the others
        self._watch(mine)
        try:
            yield
        finally:
            for number in mine:
                snapshot = self._watched.pop(number, None)
                if snapshot is not None and snapshot.differs(self._members[number].parameter):
                    self._put_back(number)
                    self._versions[number] = None
        slots.require_unchanged()

    def _watch(self, numbers: Iterable[int]) -> None:
        self._watched |= {number: Snapshot(self._members[number].parameter) for number in numbers}

    def writes(self) -> dict[Member, torch.Tensor]:
        """Return the parameters that were written to since the last update, each with its place in the library's memory."""
        return {
            self._members[number]: place for number, place in enumerate(self._places) if self._is_written(number, place)
        }

    def _is_written(self, number: int, place: torch.Tensor) -> bool:
        parameter = self._members[number].parameter
        if parameter._version != self._versions[number] or is_elsewhere(parameter, place):
            return True
        return number in self._watched and self._watched[number].differs(parameter)

    def take_over(self) -> None:
        """Copy what was written into the library's memory, if it is not there."""
        for number in range(len(self._places)):
            self._put_back(number)
            self._versions[number] = self._members[number].parameter._version
        self._watch([*self._watched])

    def _put_back(self, number: int) -> None:
        parameter, place = self._members[number].parameter, self._places[number]
        if is_elsewhere(parameter, place) and is_same_kind(parameter, place):
            place.copy_(parameter.detach().clone())  # the assigned tensor may be a view of the place
            parameter.data = place

    def require_not_cast(self) -> None:
        for member, place in zip(self._members, self._places):
            require_same_kind(member, place)

    def undo_casts(self) -> None:
        """Put parameters back that a cast of the model has replaced before it was refused."""
        for member, place in zip(self._members, self._places):
            if not is_same_kind(member.parameter, place):
                member.parameter.data = place
