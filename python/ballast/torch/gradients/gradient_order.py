"""The order in which gradients are taken. Units and their members are only numbers here."""

from __future__ import annotations

from collections.abc import Sequence


class GradientOrder:
    """Decide which units to take when a gradient arrives.

    Gradients arrive one by one, in a different order on each rank, and some of them on some ranks only. Units are taken
    as a whole and in one order, pass after pass. So all ranks take the same ones, and sums do not depend on how
    parameters are grouped into units. A pass ends when a gradient arrives for the second time.

    >>> order = GradientOrder(order=[1, 0], members=[1, 2])  # unit 0 has one parameter, unit 1 has two
    >>> order.arrived(1, 0), order.arrived(0, 0)  # unit 0 is complete, but it is not its turn
    ([], [])
    >>> order.arrived(1, 1)
    [1, 0]
    >>> order.ended_by(0, 0), order.arrived(0, 0)  # the second pass
    ([], [])
    >>> order.ended_by(0, 0)  # the third: unit 1 has got nothing new
    [1, 0]
    >>> order.arrived(0, 0), order.passes
    ([], 3)
    >>> order.rest(passes=4)  # another rank has had one pass more
    [1, 0, 1, 0]
    >>> order.ended_by(1, 0), order.held(), order.rest(passes=3)  # it waits for the next one
    ([], None, [1, 0])
    >>> order.arrived(1, 0), order.next_unit, order.missing_of_begun(1), order.missing_of_begun(0)
    ([], 1, [1], [])
    >>> order.turn(), order.turn(), order.turn(), order.rest(passes=3)  # other ranks take their units now
    (1, 0, None, [])
    >>> order.complete(passes=3), order.turn_for_others(), order.passes  # another rank has begun one pass more
    (None, (1, [0, 1]), 4)
    >>> order.has_arrived, order.arrived(0, 0), order.has_arrived
    (False, [0], False)
    """

    def __init__(self, order: Sequence[int], members: Sequence[int]):
        self._order = list(order)
        self._members = list(members)
        self._begin_pass()
        self.passes = 0  # that have begun
        self.completed: list[int] = []  # units, in the order in which they completed in the first pass

    def _begin_pass(self) -> None:
        self._missing = [set(range(count)) for count in self._members]
        self._taken = 0

    def ended_by(self, unit: int, member: int) -> list[int]:
        """Return the units that are left to take in the pass that this gradient ends. The gradient is not kept yet."""
        if self.passes == 0 or member in self._missing[unit]:
            return []
        rest = self._order[self._taken :]
        self._begin_pass()
        self.passes += 1
        return rest

    def arrived(self, unit: int, member: int) -> list[int]:
        """Return the units to take now."""
        if self.passes == 0:
            self.passes = 1
        missing = self._missing[unit]
        missing.discard(member)
        if self.passes == 1 and not missing:
            self.completed.append(unit)
        first = self._taken
        while self._taken < len(self._order) and not self._missing[self._order[self._taken]]:
            self._taken += 1
        return self._order[first : self._taken]

    @property
    def next_unit(self) -> int | None:
        """The unit whose turn it is."""
        return self._order[self._taken] if self._taken < len(self._order) else None

    def missing_of_begun(self, unit: int) -> list[int]:
        """Return the members whose gradients are missing in this pass; none before one of the unit has arrived."""
        return sorted(self._missing[unit]) if self.is_begun(unit) else []

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient has arrived in this pass whose unit is not taken."""
        return any(map(self.is_begun, self._order[self._taken :]))

    def is_begun(self, unit: int) -> bool:
        """Return whether a gradient of the unit has arrived in this pass."""
        return len(self._missing[unit]) < self._members[unit]

    def turn(self) -> int | None:
        """Return the unit whose turn it is, and count it as taken, though its gradients may come in another pass."""
        unit = self.next_unit
        if unit is not None:
            self.held()
            self._taken += 1
        return unit

    def turn_for_others(self) -> tuple[int, list[int]]:
        """Return the unit whose turn it is, in another pass if this one is complete, and its members without a gradient. Count
        the unit as taken, and these as arrived."""
        if self.next_unit is None:
            self._begin_pass()
            self.passes += 1
        unit = self._order[self._taken]
        missing = sorted(self._missing[unit])
        if self.passes <= 1 and missing:
            self.completed.append(unit)
        self._missing[unit] = set()
        self.held()
        self._taken += 1
        return unit, missing

    def held(self) -> None:
        """Count a gradient that belongs to this pass and is taken later."""
        self.passes = max(1, self.passes)

    def complete(self, passes: int) -> None:
        """Count this number of passes, of which all units are taken."""
        self.passes, self._taken = passes, len(self._order)
        self._missing = [set() for _ in self._members]

    def rest(self, passes: int) -> list[int]:
        """Return the units that complete this number of passes."""
        left = self._order[self._taken :] if self.passes > 0 else []
        return left + self._order * (passes - self.passes)
