"""Let ranks use different units of stage 3: before each use every rank says what it does next, and all ranks do the most urgent
of it together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Protocol

import torch

from ballast._torch_compat import NO_BACKWARD, call_after_backward, current_backward
from ballast.checks import fail
from ballast.errors import FailureError
from ballast.ranks import Group, words_of_all_ranks

log = logging.getLogger("ballast")

WATCHED_STEPS = 10  # ranks look for different uses in so many steps of each optimizer; the first ones have no plan anyway


class Doing(IntEnum):
    """What a rank does next, the most urgent first."""

    USE = 0  # gathers a unit
    END_CALL = 1  # ends a call of the model
    TAKE = 2  # reduces the gradients of the next unit
    END_BACKWARD = 3
    STEP = 4  # makes the step, or discards its gradients


DETAILS = 1 << 40  # what a rank does is followed by a number below this: the place of the unit
MOST_PLACES = 1 << 30
OTHER_WAIT = (
    "Find out what that rank does: it is stopped, stuck, or much slower. If it waits in a collective of its own inside of the "
    "model, and has left this unit out, as experts without tokens: use all units on all ranks before that collective (a loss "
    "times 0 counts for nothing), or make it after the call of the model."
)


class Helper(Protocol):
    """One optimizer's part of the training on this rank."""

    def name_of_unit(self, unit: int) -> str: ...
    def gather_for_others(self, unit: int, exact: bool) -> None: ...
    def take_for_others(self) -> None: ...
    def take_arrived(self) -> None: ...


class UseAgreement:
    """Agrees with the other ranks for all optimizers of a model.

    A rank that does something less urgent than the others helps them: it gathers the unit that they use and releases it at
    once, or adds the gradients that it has, or zeros, to those that they reduce. Then all ranks say again what they do next. So
    units are gathered and reduced in one order on all ranks, and ranks end calls of the model and backward passes together.

    Ranks agree in the first steps. If they have used different units by then, or if the caller says that they will, they always
    agree. Otherwise each rank follows the plan from then on, which has no room for other uses.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._joined: list[tuple[weakref.ref[Helper], Group, list[int]]] = []  # the list has each unit's place in the model
        self._steps = 0  # made since the last one has joined
        self._is_lasting = False
        self.have_differed = False  # ranks have used different units
        self._has_used = False  # this rank has used parameters since a call of the model has ended
        self._backward: int | None = None  # the outermost backward pass that runs
        self._nests = False  # others have run inside of one

    def join(self, helper: Helper, group: Group, units: Sequence[torch.Tensor], *, lasts: bool) -> None:
        """Agree for another optimizer, of whose units each has this first parameter. All ranks call it together."""
        model = self._model()
        places = {id(each): place for place, each in enumerate(model.parameters() if model is not None else ())}
        self._joined.append((weakref.ref(helper), group, [places[id(each)] for each in units]))
        self._steps = 0
        self._is_lasting = self._is_lasting or lasts

    def leave(self, helper: Helper) -> None:
        self._joined = [each for each in self._joined if each[0]() not in (None, helper)]

    @property
    def is_on(self) -> bool:
        return bool(self._joined) and (self._is_lasting or self._steps < WATCHED_STEPS * len(self._joined))

    # --- What this rank does next ---

    def use(self, helper: Helper, unit: int, exact: bool) -> None:
        """Return when all ranks gather this unit."""
        if not self.is_on:
            return
        self.see_backward(backward := current_backward())
        self._has_used = self._has_used or backward == NO_BACKWARD
        place = self._place(helper, unit)
        # Ranks that go through the units in the same direction gather most of them at the same time.
        order = place if backward == NO_BACKWARD else 2 * MOST_PLACES - place
        try:
            self._agree(Doing.USE, 2 * order + exact)
        except FailureError as error:
            if error.code != "B3302":
                raise
            fail("peer_late", error.what_happened, where=f"unit {helper.name_of_unit(unit)}, a use of it", remedy=OTHER_WAIT)

    def end_call(self) -> None:
        """Return when no rank uses parameters: the caller's own collectives may follow."""
        if (backward := current_backward()) != NO_BACKWARD:
            self.see_backward(backward)  # a recomputation, whose own backward pass follows inside of this one
        elif self._has_used and self.is_on:
            self._has_used = False
            self._agree(Doing.END_CALL)

    def take(self, helper: Helper, unit: int) -> None:
        """Return when all ranks reduce the next unit of an optimizer."""
        if self.is_on:
            # The unit that comes first in the backward pass is reduced first, if there are several optimizers.
            self._agree(Doing.TAKE, MOST_PLACES - self._place(helper, unit))

    def see_backward(self, backward: int) -> None:
        """Note that a backward pass runs, or none."""
        if backward == NO_BACKWARD:
            self._backward = None  # one that has failed does not end
        elif self._backward is None and self.is_on:
            self._backward = backward
            call_after_backward(partial(self._end_backward, backward))
        elif self._backward not in (None, backward):
            self._nests = True

    def _end_backward(self, backward: int) -> None:
        if self._backward == backward:
            self._backward = None
            if self.have_differed:
                for helper in [live for each, _, _ in self._joined if (live := each()) is not None]:
                    helper.take_arrived()
            if self.is_on:
                self._agree(Doing.END_BACKWARD)

    def knows_unused(self, backward: int) -> bool:
        """Return whether this rank can find out which gradients the backward pass does not compute, and others may wait for it.
        It does not know those that the backward passes of reentrant checkpointing compute inside of it."""
        return self.have_differed and not self._nests and self._backward == backward

    def step(self) -> None:
        """Return when all ranks end the step."""
        if self.is_on:
            self._agree(Doing.STEP)
            self._steps += 1

    # --- What all ranks do ---

    def _agree(self, doing: Doing, detail: int = 0) -> None:
        mine = doing * DETAILS + detail
        while True:
            [all_ranks] = words_of_all_ranks(self._group, [mine])
            first = min(all_ranks)
            if first != max(all_ranks) and first // DETAILS in (Doing.USE, Doing.TAKE):
                self._note_difference(first, all_ranks)
            if first == mine:
                return
            theirs, their_detail = divmod(first, DETAILS)
            if theirs == Doing.USE:
                helper, unit = self._unit(their_detail // 2)
                helper.gather_for_others(unit, bool(their_detail % 2))
            elif theirs == Doing.TAKE:
                self._unit(MOST_PLACES - their_detail)[0].take_for_others()

    @property
    def _group(self) -> Group:
        return self._joined[0][1]

    def _place(self, helper: Helper, unit: int) -> int:
        return next(places[unit] for each, _, places in self._joined if each() is helper)

    def _unit(self, order: int) -> tuple[Helper, int]:
        place = order if order < MOST_PLACES else 2 * MOST_PLACES - order
        helper, places = next((helper, places) for helper, _, places in self._joined if place in places)
        live = helper()
        assert live is not None  # an optimizer leaves before it ends
        return live, places.index(place)

    def _note_difference(self, first: int, all_ranks: list[int]) -> None:
        """Agree in all later steps too."""
        if self.have_differed:
            return
        is_declared, self.have_differed, self._is_lasting = self._is_lasting, True, True
        doing, detail = divmod(first, DETAILS)
        if not is_declared and self._group.rank == 0:
            helper, unit = self._unit(detail // 2 if doing == Doing.USE else MOST_PLACES - detail)
            log.warning(
                "ranks use different units of the model, as %s, which rank %s alone %s now. From now on they agree before each "
                "use, which takes an exchange of a few bytes, and all ranks gather what some of them use",
                helper.name_of_unit(unit),
                ", ".join(str(rank) for rank, each in enumerate(all_ranks) if each == first),
                "uses" if doing == Doing.USE else "has gradients of",
            )
