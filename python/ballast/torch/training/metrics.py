"""Figures of a step, under stable names, with tokens a second, and the part of the device's peak that the model's arithmetic
reaches."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.checks import is_number, read_count, refuse_value
from ballast.models.description import matrix_flops
from ballast.planning.hardware import named_gpu
from ballast.torch.gpu import gpu_of_tensors, name_and_bytes
from ballast.torch.parameters.units import unwrapped

log = logging.getLogger("ballast")

NO_FINITE_FACTOR = (
    "the gradients are finite, but a factor that scales or clips them is not: it may come from a norm that counts other "
    "gradients, such as those of another optimizer"
)


def metrics_of_step(step: _core.StepResult, skipped_so_far: int, custom_state: tuple[_core.Tier, int]) -> dict[str, float]:
    """Return the figures. `custom_state` is the tier and the bytes of state outside the library's memory."""
    step_metrics = step.metrics
    figures = {
        "step": float(step.step),
        "grad_norm": step.norm,
        "skipped": float(step.skipped),
        "skipped_steps": float(skipped_so_far),
        "seconds": step_metrics.seconds,
        "verified_tiles": float(step_metrics.verified),
        "repeated_steps": float(step_metrics.repeated),
        "repeat_seconds": step_metrics.repeat_seconds,
    }
    if step_metrics.timed:
        figures["exposed_seconds"] = sum(step_metrics.exposed.values())
        figures |= {f"exposed_seconds/{phase}": seconds for phase, seconds in step_metrics.exposed.items()}
        figures |= {f"stall_seconds/{lane}": seconds for lane, seconds in step_metrics.stalls.items() if seconds > 0}
    if (found := step.straggler) is not None:
        figures["slowest_rank"] = float(found.slowest)
        figures |= {"own_seconds/slowest": found.seconds, "own_seconds/median": found.median, "own_seconds/least": found.least}
    own_tier, own_bytes = custom_state
    for tier, count in step_metrics.memory.items():
        figures[f"memory_bytes/{tier}"] = float(count + (own_bytes if tier == own_tier.name else 0))
    figures["sent_bytes/inside"] = float(step_metrics.sent_inside)
    figures["sent_bytes/across"] = float(step_metrics.sent_across)
    for lane, busy in step_metrics.busy.items():
        if busy > 0:
            figures[f"bytes/{lane}"] = float(step_metrics.bytes[lane])
            figures[f"gb_per_second/{lane}"] = step_metrics.bytes[lane] / busy / 1e9
    return figures


def warn_of_step(step: _core.StepResult, has_finite_factor: bool) -> None:
    """Warn if the step was skipped, or if something else was wrong with it."""
    if step.reason and step.skipped:
        reason = step.reason if has_finite_factor or not math.isfinite(step.norm) else NO_FINITE_FACTOR
        log.warning("step %d was skipped: %s", step.step + 1, reason)
    elif step.reason:
        log.warning("step %d: %s", step.step, step.reason)


TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)  # a token looks a row up: no arithmetic
TRAINED, FROZEN = 3, 2  # forward passes that cost as much as both passes: only a trained matrix has a gradient


@dataclass(frozen=True)
class Throughput:
    """The tokens of this rank in a step, and the figures that replace those of the model and the device."""

    tokens: int
    flops_per_token: float | None = None
    peak_flops: float | None = None

    def figures(self, seconds: float, ranks: int, parameters: list[torch.nn.Parameter]) -> dict[str, float]:
        """Return the figures of a step of this many seconds. The other ranks count as having as many tokens.

        `parameters` has an entry for each use of a parameter in the model's arithmetic.
        """
        if seconds <= 0:
            return {}
        figures = {"tokens_per_second": self.tokens * ranks / seconds}
        each = training_flops(parameters) if self.flops_per_token is None else self.flops_per_token
        if each > 0:
            figures["model_flops_per_second"] = self.tokens * each / seconds
            if peak := self.peak_flops or _peak_of(parameters):
                figures["mfu"] = figures["model_flops_per_second"] / peak
        return figures


def read_throughput(tokens: int, flops_per_token: float | None, peak_flops: float | None) -> Throughput:
    """Refuse figures that are not possible."""
    tokens = read_count("tokens", tokens, needed="the tokens of this rank in a step: a whole number from 1 on")
    for name, value in {"flops_per_token": flops_per_token, "peak_flops": peak_flops}.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            refuse_value(name, value, "a number above 0; or None")
    return Throughput(tokens, flops_per_token, peak_flops)


def used_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that multiply: a tied one for each of its modules, and none of a table."""
    modules = (module for module in unwrapped(model).modules() if not isinstance(module, TABLES))
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def training_flops(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Return the flops of one token's forward and backward pass: six for each element of a trained matrix, four for a
    frozen one. Attention between tokens is not counted, and neither is a forward pass that is repeated.

    >>> layer = torch.nn.Linear(8, 4, bias=False)
    >>> training_flops(layer.parameters()), training_flops(layer.requires_grad_(False).parameters())
    (192.0, 128.0)
    """
    return sum(matrix_flops(tuple(each.shape)) * (TRAINED if each.requires_grad else FROZEN) for each in parameters)


def _peak_of(parameters: Iterable[torch.nn.Parameter]) -> float | None:
    """Return the dense bf16 flops of the parameters' GPU by its data sheet; None if it is not known, or if there is none."""
    gpu = gpu_of_tensors(parameters)
    known = None if gpu is None else named_gpu(*name_and_bytes(gpu))
    return None if known is None else known.flops
