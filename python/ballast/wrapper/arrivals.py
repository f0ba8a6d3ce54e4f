"""Whose gradients are taken when. Pure: units and their members are numbers here."""

from __future__ import annotations

from collections.abc import Sequence


class Arrivals:
    """Gradients arrive one by one, on each rank in an order of its own, and some of them on some ranks only. Units are taken
    whole and in one order, pass after pass, so that all ranks take the same ones.

    >>> arrivals = Arrivals(order=[1, 0], members=[1, 2])  # unit 0 has one parameter, unit 1 has two
    >>> arrivals.arrived(1, 0), arrivals.arrived(0, 0)  # unit 0 is complete, but it is not its turn
    ([], [])
    >>> arrivals.arrived(1, 1)
    [1, 0]
    >>> arrivals.arrived(0, 0), arrivals.passes
    ([], 2)
    >>> arrivals.rest(passes=2)  # the second pass
    [1, 0]
    """

    def __init__(self, order: Sequence[int], members: Sequence[int]):
        self._order = list(order)
        self._members = list(members)
        self._came = [[0] * count for count in members]  # in this step
        self._missing = [set(range(count)) for count in members]  # since the unit was taken last
        self._taken = 0
        self.completed: list[int] = []  # units, in the order in which their first passes ended here

    @property
    def passes(self) -> int:
        """How many there have been on this rank: as many as the gradients of one parameter."""
        return max((count for unit in self._came for count in unit), default=0)

    def arrived(self, unit: int, member: int) -> list[int]:
        """The units to be taken now."""
        self._came[unit][member] += 1
        self._missing[unit].discard(member)
        if not self._missing[unit] and unit not in self.completed:
            self.completed.append(unit)
        taken = []
        while self._order and not self._missing[self._next()]:
            taken.append(self._take())
        return taken

    def rest(self, passes: int) -> list[int]:
        """The units that complete so many passes, with whatever has arrived of them. Then the next step begins."""
        rest = [self._take() for _ in range(passes * len(self._order) - self._taken)]
        self._came = [[0] * count for count in self._members]
        self._missing = [set(range(count)) for count in self._members]
        self._taken = 0
        return rest

    def _next(self) -> int:
        return self._order[self._taken % len(self._order)]

    def _take(self) -> int:
        unit = self._next()
        self._missing[unit] = set(range(self._members[unit]))
        self._taken += 1
        return unit
