"""The placements that a question leaves open."""

from __future__ import annotations

from collections.abc import Mapping

from ballast import _core
from ballast.offer import Offer

STAGES = (0, 2, 3)  # 1 and 2 are one, where gradients are summed after each use


def candidates(asked: Offer) -> list[_core.Placement]:
    """All of them, or of each stage the one that was asked for."""
    if asked.options.offload in ("auto", "none"):
        return asked.exact.placements()
    where = _spreads(asked.options.offload)
    stage = asked.options.stage
    stages = STAGES if stage is None else (stage,)
    placements = []
    for number in stages:
        if number < 3 and "parameters" in where and where["parameters"] != _core.Spread(device=1.0) and stage is None:
            continue  # whole parameters stay on the device
        placement = _core.placement_of_stage(number, asked.options.ranks)
        for kind, spread in where.items():
            setattr(placement, kind, spread)
        placement.check()
        placements.append(placement)
    return placements


Word = str | Mapping[str, float]


def _spreads(offload: str | Mapping[str, Word]) -> dict[str, _core.Spread]:
    """Of one word: the state goes there, and gradients go to the host."""
    if isinstance(offload, str):
        offload = {"state": offload, "gradients": "host"}
    return {kind: _spread(word) for kind, word in offload.items()}


def _spread(word: Word) -> _core.Spread:
    return _core.Spread(**{word: 1.0}) if isinstance(word, str) else _core.Spread(**word)
