"""Check the options of parameter groups that a file brings, before any of them is set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast.checks import is_number, refuse
from ballast.errors import Error
from ballast.wrapper.rules import Group, Rule

MakeRule = Callable[[Group], Rule]


def options_to_set(
    groups: Sequence[Group], saved: Sequence[Mapping[str, Any]], rule_of: MakeRule
) -> list[dict[str, Any]]:
    """Return the options that replace those of each group, in the types of the current ones. Raise B1001 for options
    with which the optimizer cannot make a step."""
    found = []
    for number, (group, options) in enumerate(zip(groups, saved)):
        new = {key: _as_now(group.get(key), value, f'param_groups[{number}]["{key}"]') for key, value in options.items()}
        _require_rule({**group, **new}, rule_of, f"param_groups[{number}]")
        found.append(new)
    return found


def set_options(groups: Sequence[dict[str, Any]], new: Sequence[Mapping[str, Any]]) -> None:
    """Set the options. A tensor stays the same tensor, because schedulers and compiled code may refer to it."""
    for group, options in zip(groups, new):
        for key, value in options.items():
            now = group.get(key)
            group[key] = now.fill_(value) if isinstance(now, torch.Tensor) and not isinstance(value, torch.Tensor) else value


def _as_now(now: Any, value: Any, where: str) -> Any:
    """Return the value in the type of the current one, because JSON has neither tuples nor tensors.

    >>> _as_now((0.9, 0.99), [0.8, 0.9], "betas")
    (0.8, 0.9)
    """
    if isinstance(now, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(now):
            _refuse(where, value, f"{len(now)} values")
        return tuple(_as_now(mine, theirs, where) for mine, theirs in zip(now, value))
    one = isinstance(now, torch.Tensor) and now.numel() == 1
    if one or is_number(now):
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not is_number(number) or (math.isfinite(now) and not math.isfinite(number)):
            _refuse(where, value, "a finite number")
    elif isinstance(now, str) and not isinstance(value, str):
        _refuse(where, value, "text")
    return value


def _require_rule(group: Group, rule_of: MakeRule, where: str) -> None:
    try:
        _core.check_rule(rule_of(group))
    except Error:
        raise
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        refuse(f"cannot set the options of a parameter group: {error}", where=where, needed="options of this optimizer")


def _refuse(where: str, value: Any, needed: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    refuse(f"cannot set an option of a parameter group: it is {shown}", where=where, needed=needed)
