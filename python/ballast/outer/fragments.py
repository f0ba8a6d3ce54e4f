"""The fragments of the parameters, and the step at which each is exchanged."""

from __future__ import annotations

from collections.abc import Sequence


def fragments_of(elements: Sequence[int], fragments: int) -> list[int]:
    """Return the fragment of each parameter, from their numbers of elements. Fragments are runs of whole parameters, of
    nearly equal size.

    >>> fragments_of([4, 4, 1, 1, 1, 1], 3)
    [0, 1, 2, 2, 2, 2]
    """
    total, before, found = sum(elements), 0, []
    for count in elements:
        middle = before + count / 2
        found.append(min(int(middle * fragments / total), fragments - 1) if total else 0)
        before += count
    return found


def due_at(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment that is exchanged after this step, counted from 1; None if there is none. The last one is
    exchanged after each `every` steps, and the others at equal distances before it.

    >>> [due_at(step, every=4, fragments=2) for step in range(1, 9)]
    [None, 0, None, 1, None, 0, None, 1]
    """
    position = (step - 1) % every + 1
    return next((number for number in range(fragments) if every * (number + 1) // fragments == position), None)


def part_of_rank(elements: int, rank: int, ranks: int) -> slice:
    """Return the elements of a rank, where ranks that have all elements divide them. The last ranks may have fewer, or none.

    >>> [part_of_rank(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    each = -(-elements // ranks)
    return slice(min(rank * each, elements), min((rank + 1) * each, elements))
