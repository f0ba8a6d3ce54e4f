"""Figures of a step, under stable names."""

from __future__ import annotations

import logging
import math
from typing import Literal

from ballast import _core

log = logging.getLogger("ballast")

NO_FINITE_FACTOR = (
    "the gradients are finite, but a factor that scales or clips them is not: it may come from a norm that counts other "
    "gradients, such as those of another optimizer"
)

OWN_SECONDS: dict[str, Literal["seconds", "median", "least"]] = {"slowest": "seconds", "median": "median", "least": "least"}


def metrics_of_step(step: _core.StepResult, skipped_so_far: int, custom_state: tuple[_core.Tier, int]) -> dict[str, float]:
    """Return the figures. `custom_state` is the tier and the bytes of state outside the library's memory."""
    of_step = step.metrics
    figures = {
        "step": float(step.step),
        "grad_norm": step.norm,
        "skipped": float(step.skipped),
        "skipped_steps": float(skipped_so_far),
        "seconds": of_step["seconds"],
        "verified_tiles": float(of_step["verified"]),
    }
    if of_step["timed"]:
        figures["exposed_seconds"] = sum(of_step["exposed"].values())
        figures |= {f"exposed_seconds/{phase}": seconds for phase, seconds in of_step["exposed"].items()}
        figures |= {f"stall_seconds/{lane}": seconds for lane, seconds in of_step["stalls"].items() if seconds > 0}
    if (found := step.straggler) is not None:
        figures["slowest_rank"] = float(found["slowest"])
        figures |= {f"own_seconds/{name}": found[key] for name, key in OWN_SECONDS.items()}
    own_tier, own_bytes = custom_state
    for tier, count in of_step["memory"].items():
        figures[f"memory_bytes/{tier}"] = float(count + (own_bytes if tier == own_tier.name else 0))
    figures["sent_bytes/inside"] = float(of_step["sent_inside"])
    figures["sent_bytes/across"] = float(of_step["sent_across"])
    for lane, busy in of_step["busy"].items():
        if busy > 0:
            figures[f"bytes/{lane}"] = float(of_step["bytes"][lane])
            figures[f"gb_per_second/{lane}"] = of_step["bytes"][lane] / busy / 1e9
    return figures


def warn_of_step(step: _core.StepResult, has_finite_factor: bool) -> None:
    """Warn if the step was skipped, or if something else was wrong with it."""
    if step.reason and step.skipped:
        reason = step.reason if has_finite_factor or not math.isfinite(step.norm) else NO_FINITE_FACTOR
        log.warning("step %d was skipped: %s", step.step + 1, reason)
    elif step.reason:
        log.warning("step %d: %s", step.step, step.reason)


class StepHistory:
    """The last step, and the count of skipped steps."""

    def __init__(self) -> None:
        self.last: _core.StepResult | None = None
        self.skipped = 0
        self._norm = 0.0  # of the last step's gradients, before clipping

    def add(self, step: _core.StepResult, before_clipping: float, *, warns: bool, has_finite_factor: bool) -> None:
        """Keep a step. Its gradients were scaled or clipped before it, by a factor that may not be finite, and
        `before_clipping` is the ratio of their norm before clipping to the step's."""
        self.last, self._norm = step, step.norm * before_clipping
        self.skipped += int(step.skipped)
        if warns:
            warn_of_step(step, has_finite_factor)

    def figures(self, custom_state: tuple[_core.Tier, int]) -> dict[str, float]:
        assert self.last is not None
        return metrics_of_step(self.last, self.skipped, custom_state) | {"grad_norm": self._norm}
