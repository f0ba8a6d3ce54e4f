"""Which of the library's rules does what a torch optimizer does, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ballast import _core
from ballast.checks import fail, refuse

Group = Mapping[str, Any]
Rule = _core.AdamW | _core.Adam | _core.Sgd | _core.SgdMomentum | _core.Lion | _core.Adagrad
MakeRule = Callable[[Group], Rule]


def rule_of(optimizer: torch.optim.Optimizer) -> MakeRule:
    """From a parameter group, as it is at the moment, to its rule.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> type(rule_of(optimizer)(optimizer.param_groups[0])).__name__
    'Sgd'
    """
    kind = type(optimizer)
    if kind is torch.optim.AdamW:
        return _adamw
    if kind is torch.optim.Adam:
        return _adam
    if kind is torch.optim.SGD:
        with_momentum = any(group["momentum"] != 0 for group in optimizer.param_groups)
        return _sgd_momentum if with_momentum else _sgd
    if kind is torch.optim.Adagrad:
        if any(group["initial_accumulator_value"] != 0 for group in optimizer.param_groups):
            refuse("Adagrad with an initial_accumulator_value was wrapped", needed="0")
        return _adagrad
    if kind.__name__ == "Lion" and set(optimizer.defaults) >= {"lr", "betas", "weight_decay"}:
        return _lion
    fail(
        "unsupported",
        _core.Problem(
            what=f"the optimizer {kind.__module__}.{kind.__qualname__} was wrapped",
            needed="AdamW, Adam, SGD, Adagrad of torch.optim, or a Lion",
            remedy="Use one of these: others cannot be trusted to work on parts of a parameter.",
        ),
    )


def _adamw(group: Group) -> Rule:
    return _core.AdamW(**_of_adam(group), **_common(group))


def _adam(group: Group) -> Rule:
    make = _core.AdamW if group.get("decoupled_weight_decay") else _core.Adam
    return make(**_of_adam(group), **_common(group))


def _of_adam(group: Group) -> dict[str, Any]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return {"beta1": beta1, "beta2": beta2, "eps": float(group["eps"]), "amsgrad": bool(group["amsgrad"])}


def _sgd(group: Group) -> Rule:
    return _core.Sgd(**_common(group))


def _sgd_momentum(group: Group) -> Rule:
    return _core.SgdMomentum(
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
        **_common(group),
    )


def _adagrad(group: Group) -> Rule:
    return _core.Adagrad(lr_decay=float(group["lr_decay"]), eps=float(group["eps"]), **_common(group))


def _lion(group: Group) -> Rule:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return _core.Lion(beta1=beta1, beta2=beta2, **_common(group))


def _common(group: Group) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group.get("maximize", False)),
    }
