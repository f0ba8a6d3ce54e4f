"""Where parameters, gradients and optimizer state are kept, in words."""

from __future__ import annotations

from collections.abc import Mapping

from ballast import _core
from ballast.checks import refuse

KINDS = ("parameters", "gradients", "state")
TIERS = tuple(tier.name for tier in _core.Tier)

Place = str | Mapping[str, float]  # a tier, or fractions of tiers; a drive may have its directory: "nvme:/scratch"
Offload = str | Mapping[str, Place]


def by_kind(offload: Offload) -> Mapping[str, Place]:
    """Of one word: the state goes there, and gradients with it, where they can."""
    return {"state": offload, "gradients": "host"} if isinstance(offload, str) else offload


def fractions_of(place: Place) -> Mapping[str, float]:
    """By word.

    >>> fractions_of("host")
    {'host': 1.0}
    """
    if isinstance(place, str):
        return {place: 1.0}
    if not isinstance(place, Mapping) or not place:
        refuse(f"{place!r} is no place", needed='a tier, or fractions of tiers such as {"device": 0.25, "host": 0.75}')
    for word, part in place.items():
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            refuse(f"{part!r} is no part of what is kept on {word}", needed="fractions that add up to 1")
    if len({tier_of(word) for word in place}) < len(place):
        refuse(f"{dict(place)} names a tier twice", needed="one directory for what goes to drives")
    return place


def tier_of(word: str) -> str:
    """Without its directory."""
    return word.partition(":")[0]


def spread_of(place: Place) -> _core.Spread:
    """
    >>> spread_of({"device": 0.25, "nvme:/scratch": 0.75}).nvme
    0.75
    """
    return _core.Spread(**{tier_of(word): float(part) for word, part in fractions_of(place).items()})


def fractions_in(spread: _core.Spread) -> dict[str, float]:
    """By tier, where there is anything."""
    parts = {tier: float(getattr(spread, tier)) for tier in TIERS}
    return {tier: part for tier, part in parts.items() if part > 0}


def in_words(stage: int, places: Mapping[str, Mapping[str, float]], *, device: str) -> str:
    """
    >>> in_words(3, {"parameters": {"device": 1.0}, "state": {"device": 0.25, "nvme": 0.75}}, device="the GPU")
    'stage 3, state 25% on the GPU and 75% on drives'
    """
    words = {"device": f"on {device}", "host": "on the host", "nvme": "on drives"}

    def spread(parts: Mapping[str, float]) -> str:
        if len(parts) == 1:
            return words[next(iter(parts))]
        return " and ".join(f"{part:.0%} {words[tier]}" for tier, part in parts.items())

    away = [f"{kind} {spread(parts)}" for kind, parts in places.items() if parts.get("device") != 1]
    return ", ".join([f"stage {stage}", *away])


def set_places(placement: _core.Placement, offload: Offload) -> None:
    """Refuses what cannot be, such as fractions that do not add up."""
    for kind, place in by_kind(offload).items():
        setattr(placement, kind, spread_of(place))
    placement.check()
