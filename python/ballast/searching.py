"""The placement that is predicted to take the least time, of all that fit."""

from __future__ import annotations

from collections.abc import Mapping

from ballast import _core
from ballast.errors import OutOfMemoryError
from ballast.sizes import human_size

TILE = 256 << 10  # elements, as the engine cuts them
COARSE_TILES = 2048  # of a rank, when ways are compared: a hundredth of the step's time is finer than anybody's rates


def coarse_tile(elements: int, *, tile: int = TILE) -> int:
    """To compare ways with, where a rank has so many elements."""
    return max(tile, tile * (elements // (tile * COARSE_TILES)))


def fits(needs: Mapping[str, int], has: Mapping[str, int]) -> bool:
    """Whether each tier has room for what is needed of it."""
    return all(size <= has[tier] for tier, size in needs.items())


def fastest(exact: _core.Question, coarse: _core.Question, has: Mapping[str, int]) -> _core.Choice:
    """Searched with large tiles, which is fast; what is found is then compiled as it will be. Raises B2004 where nothing
    fits."""
    try:
        choice = coarse.choose()
    except OutOfMemoryError:
        if not any_fits(exact, coarse, has):
            raise
        return exact.choose()
    return exact.price(choice.placement) if fits(exact.needs(choice.placement), has) else exact.choose()


def any_fits(exact: _core.Question, coarse: _core.Question, has: Mapping[str, int]) -> bool:
    """Whether a placement fits with the engine's tiles, of those that fit or nearly fit with large ones."""
    near = (placement for placement in exact.placements() if _nearly_fits(coarse.needs(placement), has))
    return any(fits(exact.needs(placement), has) for placement in near)


def _nearly_fits(needs: Mapping[str, int], has: Mapping[str, int]) -> bool:
    """Large tiles change what a tier needs by a few hundredths of the whole at most."""
    margin = sum(needs.values()) // 20
    return fits(needs, {tier: size + margin for tier, size in has.items()})


def by_tier(sizes: Mapping[str, int]) -> str:
    """For people.

    >>> by_tier({"device": 3 << 30, "host": 0})
    'device 3 GiB, host 0 B'
    """
    return ", ".join(f"{tier} {human_size(size)}" for tier, size in sizes.items())
