"""Find the placement with the shortest predicted step among those that fit."""

from __future__ import annotations

from collections.abc import Mapping

from ballast import _core
from ballast.errors import OutOfMemoryError
from ballast.sizes import human_size

LARGEST_TILE = 2 << 20  # elements of the engine's tiles outside the device, in a large model
COARSE_TILES = 2048  # of a rank, to compare placements: rates are not known to more than a hundredth of a step


def coarse_tile(elements: int, *, tile: int = 0) -> int:
    """Return the size of tiles for comparing placements, for a rank with this many elements.

    It is `tile` where a rank has few of those; 0 stands for the engine's own sizes.

    >>> coarse_tile(10**9), coarse_tile(10**9, tile=1024), coarse_tile(70 * 10**9) >> 20
    (0, 487424, 32)
    """
    size = tile or LARGEST_TILE
    larger = elements // (size * COARSE_TILES)
    return size * larger if larger > 1 else tile


def fits(needs: Mapping[str, int], has: Mapping[str, int]) -> bool:
    """Return whether each tier has the memory that is needed."""
    return all(size <= has[tier] for tier, size in needs.items())


def fastest(exact: _core.Question, coarse: _core.Question, has: Mapping[str, int]) -> _core.Choice:
    """Search with large tiles, which is fast, then price the result with the engine's tiles.

    Raises B2004 where nothing fits."""
    try:
        choice = coarse.choose()
    except OutOfMemoryError:
        if not any_fits(exact, coarse, has):
            raise
        return exact.choose()
    return exact.price(choice.placement) if fits(exact.needs(choice.placement), has) else exact.choose()


def any_fits(exact: _core.Question, coarse: _core.Question, has: Mapping[str, int]) -> bool:
    """Return whether a placement fits with the engine's tiles, among those that fit, or nearly fit, with large
    tiles."""
    near = (placement for placement in exact.placements() if _nearly_fits(coarse.needs(placement), has))
    return any(fits(exact.needs(placement), has) for placement in near)


def _nearly_fits(needs: Mapping[str, int], has: Mapping[str, int]) -> bool:
    """Return whether needs fit within a margin: large tiles change a tier's memory by a few hundredths of the total."""
    margin = sum(needs.values()) // 20
    return fits(needs, {tier: size + margin for tier, size in has.items()})


def by_tier(sizes: Mapping[str, int]) -> str:
    """Format sizes for messages.

    >>> by_tier({"device": 3 << 30, "host": 0})
    'device 3 GiB, host 0 B'
    """
    return ", ".join(f"{tier} {human_size(size)}" for tier, size in sizes.items())
