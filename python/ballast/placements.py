"""The placements that a question leaves open."""

from __future__ import annotations

from ballast import _core
from ballast.offer import Offer
from ballast.places import by_kind, set_places, spread_of

STAGES = (0, 2, 3)  # 1 and 2 are one, where gradients are summed after each use


def candidates(asked: Offer) -> list[_core.Placement]:
    """All of them, or of each stage the one that was asked for."""
    if asked.options.offload in ("auto", "none"):
        return asked.exact.placements()
    parameters = spread_of(by_kind(asked.options.offload).get("parameters", "device"))
    stage = asked.options.stage
    stages = STAGES if stage is None else (stage,)
    placements = []
    for number in stages:
        if number < 3 and parameters != _core.Spread(device=1.0) and stage is None:
            continue  # whole parameters stay on the device
        placement = _core.placement_of_stage(number, asked.options.ranks)
        set_places(placement, asked.options.offload)
        placements.append(placement)
    return placements
