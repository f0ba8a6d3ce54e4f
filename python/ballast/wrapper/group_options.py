"""Check the options of parameter groups: those of each step, and those that a file brings, before any of them is set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast.checks import fail, is_number, refuse
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
        _checked_rule({**group, **new}, rule_of, number, "set")
        found.append(new)
    return found


def set_options(groups: Sequence[dict[str, Any]], new: Sequence[Mapping[str, Any]]) -> None:
    """Set the options. A tensor stays the same tensor, because schedulers and compiled code may refer to it."""
    for group, options in zip(groups, new):
        for key, value in options.items():
            now = group.get(key)
            group[key] = now.fill_(value) if isinstance(now, torch.Tensor) and not isinstance(value, torch.Tensor) else value


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of an option are equal, also as a tensor and a number, or as a tuple and a list.

    >>> is_same((0.9, 0.99), [0.9, 0.99]), is_same(torch.tensor(0.5), 0.5), is_same(None, 0)
    (True, True, False)
    """
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    values = [each.tolist() if isinstance(each, torch.Tensor) else each for each in (one, other)]
    return bool(values[0] == values[1])


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


def rules_of(groups: Iterable[tuple[int, Group]], rule_of: MakeRule) -> list[Rule]:
    """Return the rule of each group as it is now. Raise B1001 for options with which the optimizer cannot make a step. Each
    group comes after its place in the optimizer."""
    places, rules = [], []
    for place, group in groups:
        places.append(place)
        rules.append(_checked_rule(group, rule_of, place, "use"))
    for place, rule in zip(places, rules):
        if type(rule) is not type(rules[0]):
            _refuse_kinds(places[0], rules[0], place, rule)
    return rules


def _checked_rule(group: Group, rule_of: MakeRule, number: int, use: str) -> Rule:
    try:
        rule = rule_of(group)
        _core.check_rule(rule)
        return rule
    except Error:
        raise
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        what = f"cannot {use} the options of a parameter group: {error}"
        refuse(what, where=f"param_groups[{number}]", needed="options of this optimizer")


def _refuse_kinds(first: int, rule: Rule, other: int, its_rule: Rule) -> NoReturn:
    """Refuse groups that need different rules: of torch's optimizers, only those of Adam may."""
    names = [f"param_groups[{place}]" for place in (first, other)]
    fail(
        "unsupported",
        _core.Problem(
            what="cannot update parameter groups by different rules: one has another decoupled_weight_decay than the other",
            where=f"{names[0]}, updated as {type(rule).__name__}, and {names[1]}, updated as {type(its_rule).__name__}",
            needed="the same decoupled_weight_decay in all groups of an optimizer",
            remedy="Make an optimizer of each, and wrap both in one call: ballast.wrap([one, other], model).",
        ),
    )


def _refuse(where: str, value: Any, needed: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    refuse(f"cannot set an option of a parameter group: it is {shown}", where=where, needed=needed)
