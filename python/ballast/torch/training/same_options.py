"""Refuse ranks that train with different options: each rank updates its own shard of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ballast.checks import refuse
from ballast.connecting import Group
from ballast.formats import AUTO
from ballast.tiers import fractions_by_tier
from ballast.torch.collectives import from_all_ranks
from ballast.wrap_options import WrapOptions


def require_same(group: Group, mine: dict[str, str]) -> None:
    """Compare options by name. All ranks call it together, and raise the same error if one has another value."""
    if group.size == 1:
        return
    first, *others = from_all_ranks(group, mine)
    for rank, theirs in enumerate(others, start=1):
        for name in [*first, *theirs]:
            here, there = first.get(name, "nothing"), theirs.get(name, "nothing")
            if here != there:
                refuse(
                    f"cannot train: rank {rank} has another {name} than rank 0",
                    where=f"{name} is {there} on rank {rank}, and {here} on rank 0",
                    needed="the same optimizer and the same options on all ranks",
                )


def require_same_end(are_discarded: Sequence[int]) -> None:
    """Refuse to make a step on some ranks with gradients that others discard. `are_discarded` has 0 or 1 of each rank."""
    if len({*are_discarded}) > 1:
        refuse(
            f"cannot make a step: rank {are_discarded.index(1)} discarded its gradients",
            where=f"rank {are_discarded.index(0)} did not",
            needed="zero_grad() and step() on all ranks together, and the same found_inf of gradient scalers",
        )


def described(optimizer: torch.optim.Optimizer, options: WrapOptions) -> dict[str, str]:
    """Return everything that has to be the same on all ranks, by name.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    >>> options = WrapOptions(stage=2, offload="host")
    >>> found = described(optimizer, options)
    >>> found["optimizer"], found["stage"], found["offload"], found["lr of parameter group 0"]
    ('SGD', '2', "{'gradients': {'host': 1.0}, 'state': {'host': 1.0}}", '0.5')
    """
    found = {"optimizer": type(optimizer).__name__, "number of parameter groups": str(len(optimizer.param_groups))}
    found |= {name: str(value) for name, value in options.shared().items()}
    by_kind = sorted(options.tiers.items())
    tiers = {kind: fractions_by_tier(of) for kind, of in by_kind}
    found["offload"] = AUTO if options.chooses_tiers else str(tiers)
    return found | described_groups(optimizer)


def described_groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the options of the parameter groups, which may change from step to step, by name."""
    return {
        f"{name} of parameter group {number}": str(plain)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if is_plain(plain := _without_tensor(value))
    }


def is_plain(value: Any) -> bool:
    """Return whether the text of a value is the same on all ranks.

    >>> is_plain((0.9, 0.999)), is_plain(None), is_plain(print)
    (True, True, False)
    """
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (int, float, str))


def _without_tensor(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
