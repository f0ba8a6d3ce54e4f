"""Choose how updates are made for an optimizer."""

from __future__ import annotations

import torch

from ballast.wrapper.custom_optimizer import CustomUpdates
from ballast.wrapper.rule_updates import RuleUpdates
from ballast.wrapper.rules import require_elementwise, rule_of
from ballast.wrapper.stored_updates import StoredUpdates
from ballast.wrapper.updates import Updates


def updates_of(optimizer: torch.optim.Optimizer, *, declared: bool, stored: bool) -> Updates:
    """Return updates by a rule of the library, if it has one; else by the optimizer's own step. `declared` is true if the
    user declares that this step does the same to each element. The library keeps the state of that step if `stored`."""
    make_rule = rule_of(optimizer)
    if make_rule is not None:
        return RuleUpdates(make_rule)
    require_elementwise(optimizer, declared)
    return StoredUpdates(optimizer) if stored else CustomUpdates(type(optimizer))
