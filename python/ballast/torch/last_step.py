"""The last step of a wrapped optimizer, for those who show and record steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from ballast.checks import refuse, refuse_order
from ballast.torch.optimizer import WrappedOptimizer


def wrapped_in(optimizer: object) -> WrappedOptimizer | None:
    """Return the wrapped optimizer: this one, or the one inside an optimizer of Accelerate or Lightning."""
    found = (each for each in (optimizer, getattr(optimizer, "optimizer", None)) if isinstance(each, WrappedOptimizer))
    return next(found, None)


def require_wrapped(optimizer: object, what: str) -> WrappedOptimizer:
    """Return the wrapped optimizer. `what` says what it is needed for."""
    if (found := wrapped_in(optimizer)) is None:
        kind = type(optimizer).__name__
        refuse(f"cannot {what}: this {kind} is not wrapped", needed="an optimizer of ballast.wrap()")
    return found


def figures_of(optimizer: WrappedOptimizer, what: str) -> dict[str, float]:
    """Return the figures of the last step."""
    figures = optimizer.metrics()
    if not figures:
        refuse_order(f"cannot {what}: the optimizer has made none yet", needed="a call after step()")
    return figures


def loss_value(loss: Any) -> float:
    """Return a loss as a number. It is the mean of a tensor with several elements, as DataParallel returns them.

    >>> loss_value(torch.tensor([1.0, 3.0])), loss_value(2)
    (2.0, 2.0)
    """
    return float(loss.detach().float().mean()) if isinstance(loss, torch.Tensor) else float(loss)


def learning_rates(optimizer: WrappedOptimizer) -> dict[str, float]:
    """Return the learning rate by name: `lr`, or one for each parameter group where these differ."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if len(set(rates)) > 1:
        return {f"lr/{number}": rate for number, rate in enumerate(rates)}
    return {"lr": rates[0]} if rates else {}


def finite(value: float) -> float | None:
    """Return the number; None for one that JSON does not have."""
    return value if math.isfinite(value) else None


def described_training(optimizer: WrappedOptimizer) -> dict[str, Any]:
    """Return what a record of a training says about all of its steps."""
    training = optimizer._ballast
    options = training.options
    return {
        "rank": training.group.rank,
        "ranks": training.group.size,
        "optimizer": type(optimizer).__name__,
        "stage": options.stage,
        "state_format": options.formats.state,
        "gradient_format": options.formats.gradients,
        "memory": optimizer.memory(),
    }
