"""Choose how updates are made for an optimizer."""

from __future__ import annotations

import torch

from ballast import _core
from ballast.checks import fail
from ballast.torch.updates.adafactor import AdafactorUpdates
from ballast.torch.updates.custom_step import makes_steps_of_lion
from ballast.torch.updates.custom_updates import CustomUpdates, StoredUpdates
from ballast.torch.updates.rule_updates import RuleUpdates
from ballast.torch.updates.rules import is_named_lion, require_elementwise, rule_of
from ballast.torch.updates.updates import Updates


def updates_of(optimizer: torch.optim.Optimizer, *, declared: bool, stored: bool) -> Updates:
    """Return updates by a rule of the library, if it has one; else by the optimizer's own step. `declared` is true if the
    user declares that this step does the same to each element. The library keeps the state of that step if `stored`."""
    make_rule = rule_of(optimizer)
    if make_rule is not None and (not is_named_lion(optimizer) or makes_steps_of_lion(optimizer)):
        return RuleUpdates(make_rule)
    if type(optimizer) is torch.optim.Adafactor:
        if stored:
            refuse_parts_of_matrices()
        return AdafactorUpdates(torch.optim.Adafactor)
    require_elementwise(optimizer, declared)
    return StoredUpdates(optimizer) if stored else CustomUpdates(type(optimizer))


def refuse_parts_of_matrices() -> None:
    fail(
        "unsupported",
        _core.Problem(
            what="cannot update the matrices of Adafactor part by part: its step needs the sums of a whole matrix first",
            needed='state on the device or on the host alone, without tile=, memory= and "auto"',
            remedy='Wrap it with offload={"state": "host"}, or without offload.',
        ),
    )
