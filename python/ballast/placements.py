"""The placements that a question leaves open."""

from __future__ import annotations

from ballast import _core
from ballast.offer import Offer
from ballast.options import Options
from ballast.places import by_kind, set_places, spread_of

STAGES = (0, 2, 3)  # 1 and 2 are one, where gradients are summed after each use


def stages(options: Options) -> tuple[int, ...]:
    """The one that the user fixed, or those that differ."""
    if options.stage is not None:
        return (options.stage,)
    if options.chooses_places or _parameters(options) == _core.Spread(device=1.0):
        return STAGES
    return (3,)  # whole parameters stay on the device


def candidates(asked: Offer) -> list[_core.Placement]:
    """All of them, or of each stage the one that was asked for."""
    if asked.options.chooses_places:
        return asked.exact.placements()
    placements = []
    for stage in stages(asked.options):
        placement = _core.placement_of_stage(stage, asked.options.ranks)
        set_places(placement, asked.options.offload)
        placements.append(placement)
    return placements


def _parameters(options: Options) -> _core.Spread:
    return spread_of(by_kind(options.offload).get("parameters", "device"))
