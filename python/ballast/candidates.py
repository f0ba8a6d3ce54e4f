"""List the placements that a request leaves open."""

from __future__ import annotations

from dataclasses import replace

from ballast import _core
from ballast.options import Options
from ballast.plan_question import question_of
from ballast.plan_request import PlanRequest
from ballast.tiers import set_tiers, spread_of, tiers_by_kind

STAGES = (0, 2, 3)  # 1 and 2 do not differ, because gradients are reduced after each use


def stages(options: Options) -> tuple[int, ...]:
    """Return the requested stage, or else all stages that differ."""
    if options.stage is not None:
        return (options.stage,)
    if options.parameter_replicas == 1 and (options.chooses_tiers or _parameters(options) == _core.Spread(device=1.0)):
        return options.wire.stages(STAGES, options.ranks_of_host)
    return (3,)  # below stage 3 each rank keeps all parameters, on the device


def candidates(request: PlanRequest) -> list[_core.Placement]:
    """Return all placements, or the requested one in each stage."""
    if request.options.chooses_tiers:
        return _with_state_on_drives(request) if request.options.resumable else request.exact.placements()
    placements = []
    for stage in stages(request.options):
        placement = _core.placement_of_stage(stage, request.options.ranks_of_host)
        placement.parameter_replicas = request.options.parameter_replicas
        set_tiers(placement, request.options.offload)
        placements.append(placement)
    return placements


def _with_state_on_drives(request: PlanRequest) -> list[_core.Placement]:
    """Return all placements of a run that resumes, whose state is all on drives. A machine without drives has them, too: the
    error then names the missing space."""
    with_drives = replace(request.budget, nvme=max(1, request.budget.nvme))
    placements = question_of(request.description, request.options, with_drives).placements()
    return [placement for placement in placements if placement.state.nvme == 1.0]


def _parameters(options: Options) -> _core.Spread:
    return spread_of(tiers_by_kind(options.offload).get("parameters", "device"))
