"""The placements that a question leaves open."""

from __future__ import annotations

from ballast import _core
from ballast.options import Options
from ballast.places import by_kind, set_places, spread_of
from ballast.plan_request import PlanRequest

STAGES = (0, 2, 3)  # 1 and 2 are one, where gradients are summed after each use


def stages(options: Options) -> tuple[int, ...]:
    """The one that the user fixed, or those that differ."""
    if options.stage is not None:
        return (options.stage,)
    if options.chooses_places or _parameters(options) == _core.Spread(device=1.0):
        return STAGES
    return (3,)  # whole parameters stay on the device


def candidates(request: PlanRequest) -> list[_core.Placement]:
    """All of them, or of each stage the one that was asked for."""
    if request.options.chooses_places:
        return request.exact.placements()
    placements = []
    for stage in stages(request.options):
        placement = _core.placement_of_stage(stage, request.options.ranks)
        set_places(placement, request.options.offload)
        placements.append(placement)
    return placements


def _parameters(options: Options) -> _core.Spread:
    return spread_of(by_kind(options.offload).get("parameters", "device"))
