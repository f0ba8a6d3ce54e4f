"""Whose gradients are taken when. Pure: units and their members are numbers here."""

from __future__ import annotations

from collections.abc import Sequence


class GradientOrder:
    """Gradients arrive one by one, on each rank in an order of its own, and some of them on some ranks only. Units are taken
    whole and in one order, pass after pass, so that all ranks take the same ones, and sums do not depend on what is a unit.
    A pass ends where a gradient arrives for the second time.

    >>> arrivals = GradientOrder(order=[1, 0], members=[1, 2])  # unit 0 has one parameter, unit 1 has two
    >>> arrivals.arrived(1, 0), arrivals.arrived(0, 0)  # unit 0 is complete, but it is not its turn
    ([], [])
    >>> arrivals.arrived(1, 1)
    [1, 0]
    >>> arrivals.ended_by(0, 0), arrivals.arrived(0, 0)  # the second pass
    ([], [])
    >>> arrivals.ended_by(0, 0)  # and the third: unit 1 had nothing new
    [1, 0]
    >>> arrivals.arrived(0, 0), arrivals.passes
    ([], 3)
    >>> arrivals.rest(passes=4)  # another rank has had one more
    [1, 0, 1, 0]
    >>> arrivals.ended_by(1, 0), arrivals.held(), arrivals.rest(passes=3)  # this one waits for what comes
    ([], None, [1, 0])
    """

    def __init__(self, order: Sequence[int], members: Sequence[int]):
        self._order = list(order)
        self._members = list(members)
        self._begin_pass()
        self.passes = 0  # begun
        self.completed: list[int] = []  # units, in the order in which they were complete in the first pass

    def _begin_pass(self) -> None:
        self._missing = [set(range(count)) for count in self._members]
        self._taken = 0

    def ended_by(self, unit: int, member: int) -> list[int]:
        """What is left to take of the pass that ends when this gradient arrives; to be asked before it is put aside."""
        if self.passes == 0 or member in self._missing[unit]:
            return []
        rest = self._order[self._taken :]
        self._begin_pass()
        self.passes += 1
        return rest

    def arrived(self, unit: int, member: int) -> list[int]:
        """What is to be taken now."""
        self.passes = max(1, self.passes)
        self._missing[unit].discard(member)
        if self.passes == 1 and not self._missing[unit]:
            self.completed.append(unit)
        first = self._taken
        while self._taken < len(self._order) and not self._missing[self._order[self._taken]]:
            self._taken += 1
        return self._order[first : self._taken]

    def held(self) -> None:
        """A gradient has come that is not to be taken yet, but in this pass."""
        self.passes = max(1, self.passes)

    def rest(self, passes: int) -> list[int]:
        """What completes so many passes."""
        left = self._order[self._taken :] if self.passes > 0 else []
        return left + self._order * (passes - self.passes)
