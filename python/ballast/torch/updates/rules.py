"""Updates by a rule of the library, and which optimizers have one. The rule has the values of a parameter group's options.
They are checked in each step; those that a file brings, before any of them is set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ballast import _core
from ballast.checks import is_number, refuse, refuse_unsupported
from ballast.errors import Error
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.parts import part_of
from ballast.torch.updates.adafactor import AdafactorUpdates, refuse_parts_of_matrices
from ballast.torch.updates.commit_metadata import decode_missed_steps, encode_missed_steps, join_missed_steps
from ballast.torch.updates.custom_step import makes_steps_of_lion
from ballast.torch.updates.custom_updates import CustomUpdates, StoredUpdates
from ballast.torch.updates.sharded_state import (
    IN_LIBRARY,
    LazyState,
    Rule,
    ShardedState,
    State,
    changed_state,
    lazy_moment,
    moments_in,
    reads_same,
)
from ballast.torch.updates.updates import Group, MakeRule, Updates


def updates_of(optimizer: Optimizer, *, declared: bool, stored: bool) -> Updates:
    """Return updates by a rule of the library, if it has one; else by the optimizer's own step. `declared` is true if the
    user declares that this step does the same to each element. The library keeps the state of that step if `stored`."""
    make_rule = rule_of(optimizer)
    _require_whole_matrices(optimizer)
    if make_rule is not None and (not is_named_lion(optimizer) or makes_steps_of_lion(optimizer)):
        return RuleUpdates(make_rule)
    if type(optimizer) is torch.optim.Adafactor:
        if stored:
            refuse_parts_of_matrices()
        return AdafactorUpdates(torch.optim.Adafactor)
    require_elementwise(optimizer, declared)
    return StoredUpdates(optimizer) if stored else CustomUpdates(type(optimizer))


def _require_whole_matrices(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if kind not in ("Muon", "Adafactor"):
        return
    for group in optimizer.param_groups:
        for each in group["params"]:
            if (part := part_of(each)) is not None and part.local_shape != tuple(part.shape):
                refuse_unsupported(
                    f"cannot train shards of a DTensor with {kind}: {NEEDS_FULL_PARAMETERS[kind]}",
                    where=f"a parameter of shape {tuple(part.shape)}, of which this rank has {part.local_shape}",
                    needed="replicated DTensors, or plain parameters",
                    remedy="Give such parameters to an optimizer that does the same to each element, such as AdamW.",
                )


MOMENTS = (_core.Moment.momentum, _core.Moment.variance)


class RuleUpdates(Updates):
    """Updates by a rule of the library, which keeps up to two moments of each parameter, and counts steps."""

    has_custom_step = False

    def __init__(self, make_rule: MakeRule):
        self.rule = make_rule
        self._shown: dict[int, dict[str, LazyState]] = {}  # the state in optimizer.state, by id of the parameter
        self._objects: StateObjects | None = None  # the objects in optimizer.state when it was last found to be as it was shown
        self._given: set[int] = set()  # ids of parameters whose state was loaded

    def moments(self, optimizer: Optimizer) -> list[tuple[_core.Moment, str]]:
        rule = self.rule(optimizer.param_groups[0])
        return [(moment, name) for moment, name in zip(MOMENTS, _core.state_names(rule)) if name]

    def begin(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        names = self.moments(optimizer)
        if moments := moments_in(state, shards, names):
            shards.write_moments(moments)
        has_state_at_once = isinstance(self.rule(optimizer.param_groups[0]), _core.Adagrad)  # torch makes it with the optimizer
        self._given = {id(each.parameter) for each in shards.members if has_state_at_once or state.get(id(each.parameter))}
        for member in shards.members:
            self._shown[id(member.parameter)] = {
                "step": LazyState.of((), f"{member.name}, step", partial(steps_of, shards, member)),
                **{name: lazy_moment(shards, member, moment, name) for moment, name in names},
            }
            optimizer.state[member.parameter] = {**self._shown[id(member.parameter)]}

    def unbegun(self, shards: ShardedState) -> list[torch.nn.Parameter]:
        return [member.parameter for member in shards.members if not self._has_begun(shards, member)]

    def _has_begun(self, shards: ShardedState, member: UnitParameter) -> bool:
        return shards.steps > member.missed or id(member.parameter) in self._given

    def changed_state(self, optimizer: Optimizer, shards: ShardedState) -> State | None:
        """Notice when the user puts other objects in the place of state that is shown. No value is looked at."""
        if self._objects is not None and self._objects.are_in(optimizer.state):
            return None
        if not all(self._has_kept(optimizer, member.parameter) for member in shards.members):
            return changed_state(optimizer, shards, shards.members)
        self._objects = StateObjects(optimizer.state)
        return None

    def _has_kept(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        now, shown = optimizer.state.get(parameter), self._shown.get(id(parameter))
        if not isinstance(now, dict) or shown is None or not all(reads_same(now.get(name), shown[name]) for name in shown):
            return False
        self._shown[id(parameter)] = {name: now[name] for name in shown}  # they may be on another device
        return True

    def take_out(self, optimizer: Optimizer, shards: ShardedState) -> State:
        kept_here = {name: IN_LIBRARY for _, name in self.moments(optimizer)}
        begun = [member for member in shards.members if self._has_begun(shards, member)]
        return {id(member.parameter): {"step": steps_of(shards, member), **kept_here} for member in begun}

    def keep_metadata(self, shards: ShardedState, state: State) -> None:
        if shards.keeps_run:
            shards.core.set_note(encode_missed_steps(shards.members))

    def resume_metadata(self, shards: ShardedState) -> None:
        counts = decode_missed_steps(shards.core.note(), shards.steps) or [0] * len(shards.members)
        for member, missed in zip(shards.members, counts):
            member.missed = missed

    def join_metadata(self, metadata: Sequence[bytes], places: Sequence[int]) -> bytes:
        return join_missed_steps(metadata, places)

    def forget_partition(self) -> None:
        self._shown, self._objects = {}, None


class StateObjects:
    """All keys, dictionaries and values of an optimizer.state. Each step compares them twice, so no Python code runs for each
    parameter."""

    def __init__(self, state: Mapping[Any, Any]):
        self._keys = [*state]
        self._entries = [each for each in state.values() if isinstance(each, dict)]
        self._values = [*chain.from_iterable(map(dict.values, self._entries))]

    def are_in(self, state: Mapping[Any, Any]) -> bool:
        if len(state) != len(self._entries) or not all(map(is_, state, self._keys)):
            return False
        if not all(map(is_, state.values(), self._entries)) or sum(map(len, self._entries)) != len(self._values):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self._entries)), self._values))


def steps_of(shards: ShardedState, member: UnitParameter) -> torch.Tensor:
    """Return the count of steps of a parameter, in the form in which torch keeps it."""
    return torch.tensor(float(shards.steps - member.missed), dtype=torch.float32, device="cpu")


# --- Which optimizers have a rule ---

# Torch's optimizers whose step does the same to each element, whatever the other elements are.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# The reason why an optimizer needs full parameters, by the name of its class or of a base.
NEEDS_FULL_PARAMETERS = {
    "LBFGS": "it computes the loss again and again in a step, and its directions depend on all parameters together",
    "Adafactor": "it keeps sums of rows and columns of whole matrices",
    "Muon": "it orthogonalizes whole matrices",
    **dict.fromkeys(("Shampoo", "DistributedShampoo"), "it keeps products of whole matrices"),
    "SOAP": "it turns whole matrices",
    **dict.fromkeys(("LAMB", "Lamb", "LARS", "Lars"), "it scales a parameter's update by norms of the full parameter"),
    "SparseAdam": "it takes sparse gradients only, and gradients that are summed over ranks are dense",
}


def require_elementwise(optimizer: Optimizer, declared: bool) -> None:
    """Refuse an optimizer whose own step cannot run on shards of parameters."""
    kind = type(optimizer)
    reason = next((NEEDS_FULL_PARAMETERS[base.__name__] for base in kind.__mro__ if base.__name__ in NEEDS_FULL_PARAMETERS), "")
    what = f"cannot wrap the optimizer {kind.__module__}.{kind.__qualname__}"
    if reason:
        refuse_unsupported(
            f"{what}: {reason}",
            needed="one whose step does the same to each element, such as AdamW: ranks have shards of parameters",
            remedy="Of those that need more, torch.optim.Adafactor and torch.optim.Muon themselves are wrapped.",
        )
    if kind not in ELEMENTWISE and not declared:
        refuse_unsupported(
            f"{what}: its step may need full parameters, and ranks have shards of them",
            needed="ballast.Tuning(elementwise=True), if its step does the same to each element, whatever the others are",
            remedy="Its step then runs on this rank's shard of each parameter. Where it takes norms or sums of a full "
            "parameter, that is wrong: use an optimizer of torch.optim.",
        )


def rule_of(optimizer: Optimizer) -> MakeRule | None:
    """Return the function that makes the rule of a parameter group, as it is now; None if the library has no such rule.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> type(rule_of(optimizer)(optimizer.param_groups[0])).__name__
    'Sgd'
    """
    kind = type(optimizer)
    groups = optimizer.param_groups
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        if any(group["amsgrad"] for group in groups):
            return None
        return _adamw if kind is torch.optim.AdamW else _adam
    if kind is torch.optim.SGD:
        with_momentum = any(group["momentum"] != 0 for group in groups)
        return _sgd_momentum if with_momentum else _sgd
    if kind is torch.optim.Adagrad:
        return None if any(group["initial_accumulator_value"] != 0 for group in groups) else _adagrad
    if is_named_lion(optimizer):
        return _lion
    return _muon if kind is getattr(torch.optim, "Muon", None) else None


def is_named_lion(optimizer: Optimizer) -> bool:
    """Return whether the optimizer may be Lion, which torch does not have. Variants of it have the same name."""
    return type(optimizer).__name__ == "Lion" and set(optimizer.defaults) >= {"lr", "betas", "weight_decay"}


def _make(kind: type[Rule], group: Group, *, numbers: Sequence[str] = (), flags: Sequence[str] = (), **others: Any) -> Rule:
    """Make a rule from these options of a group, from those that every optimizer has, and from others."""
    options: dict[str, Any] = {}
    for name in (*numbers, "lr", "weight_decay"):
        value = group[name]
        try:
            if name == "betas":
                options["beta1"], options["beta2"] = map(float, value)
            else:
                options[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            needed = "not two numbers" if name == "betas" else "no number"
            raise ValueError(f"{name} is {value!r}, which is {needed}") from error
    for name in flags:
        options[name] = bool(group[name])
    if kind is not _core.Muon:  # Muon cannot maximize
        options["maximize"] = bool(group.get("maximize", False))
    return kind(**options, **others)


_adamw = partial(_make, _core.AdamW, numbers=("betas", "eps"), flags=("amsgrad",))
_plain_adam = partial(_make, _core.Adam, numbers=("betas", "eps"), flags=("amsgrad",))
_sgd_momentum = partial(_make, _core.SgdMomentum, numbers=("momentum", "dampening"), flags=("nesterov",))
_adagrad = partial(_make, _core.Adagrad, numbers=("lr_decay", "eps"))
_lion = partial(_make, _core.Lion, numbers=("betas",))


def _adam(group: Group) -> Rule:
    return _adamw(group) if group.get("decoupled_weight_decay") else _plain_adam(group)


def _sgd(group: Group) -> Rule:
    if group["momentum"] != 0:
        refuse_unsupported(
            "cannot turn momentum on after ballast.wrap(): the state of an SGD without momentum has no room for it",
            where=f"momentum={group['momentum']}",
            needed="an SGD that has momentum in one of its groups when it is wrapped",
            remedy="Give SGD its momentum before ballast.wrap(), also the one that load_state_dict() brings, and make "
            "schedulers that set one before it, too.",
        )
    return _make(_core.Sgd, group)


def _muon(group: Group) -> Rule:
    """Make the rule of a group of torch.optim.Muon, with one option that torch does not have: "orthogonalization"."""
    return _make(
        _core.Muon,
        group,
        numbers=("momentum", "eps"),
        flags=("nesterov",),
        ns_coefficients=[float(each) for each in group["ns_coefficients"]],
        ns_steps=int(group["ns_steps"]),
        matches_adamw=_is_second(group, "adjust_lr_fn", ("original", "match_rms_adamw")),
        polar_express=_is_second(group, "orthogonalization", ("newton_schulz", "polar_express")),
    )


def _is_second(group: Group, name: str, known: tuple[str, str]) -> bool:
    value = group.get(name)
    if value is not None and value not in known:
        refuse(f"cannot use Muon with {name}={value!r}", needed=f"{known[0]!r}, {known[1]!r} or None")
    return value == known[1]


def blocks_of(group: Group, parameter: torch.Tensor) -> list[int]:
    """Return the rows of the blocks of a matrix that Muon orthogonalizes apart; none if it is one block. The option "blocks"
    of a group is their number, or a list of their rows.

    >>> matrix = torch.ones(12, 2)
    >>> blocks_of({"blocks": 4}, matrix), blocks_of({"blocks": [6, 3, 3]}, matrix), blocks_of({}, matrix)
    ([3, 3, 3, 3], [6, 3, 3], [])
    """
    blocks = group.get("blocks")
    if blocks is None:
        return []
    rows = parameter.shape[0] if parameter.dim() == 2 else 0
    if type(blocks) is int and blocks > 0 and rows > 0 and rows % blocks == 0:
        return [rows // blocks] * blocks
    if isinstance(blocks, Sequence) and all(type(each) is int and each > 0 for each in blocks) and sum(blocks) == rows:
        return list(blocks)
    refuse(
        f"cannot divide a parameter of shape {list(parameter.shape)} into blocks={blocks!r}",
        needed="a number that divides its rows, or a list of rows that together are its rows",
        remedy="Give matrices that are divided in another way a parameter group of their own.",
    )


def moments_by_name() -> dict[str, str]:
    """Return which moment of the library each name of torch is: "momentum" or "variance".

    >>> moments_by_name()
    {'exp_avg': 'momentum', 'exp_avg_sq': 'variance', 'momentum_buffer': 'momentum', 'sum': 'variance'}
    """
    rules: list[Rule] = [
        _core.AdamW(lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=0.0),
        _core.SgdMomentum(lr=1.0, momentum=0.9, dampening=0.0, weight_decay=0.0),
        _core.Adagrad(lr=1.0, lr_decay=0.0, weight_decay=0.0, eps=1.0),
    ]
    kinds = ("momentum", "variance")
    return {name: kind for rule in rules for kind, name in zip(kinds, _core.state_names(rule)) if name}


def options_to_set(groups: Sequence[Group], saved: Sequence[Mapping[str, Any]], rule_of: MakeRule) -> list[dict[str, Any]]:
    """Return the options that replace those of each group, in the types of the current ones. Raise B1001 for options
    with which the optimizer cannot make a step."""
    found = []
    for number, (group, options) in enumerate(zip(groups, saved)):
        new = {key: _as_now(group.get(key), value, f'param_groups[{number}]["{key}"]') for key, value in options.items()}
        rules_of([(number, {**group, **new})], rule_of, use="set")
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


def rules_of(groups: Iterable[tuple[int, Group]], rule_of: MakeRule, *, use: str = "use") -> list[Rule]:
    """Return the rule of each group as it is now. Raise B1001 for options with which the optimizer cannot make a step. Each
    group comes after its place in the optimizer."""
    places, rules = [], []
    for place, group in groups:
        try:
            rule = rule_of(group)
            _core.check_rule(rule)
        except Error:
            raise
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            reason = f"they lack {error}" if isinstance(error, KeyError) else error
            what = f"cannot {use} the options of a parameter group: {reason}"
            refuse(what, where=f"param_groups[{place}]", needed="options of this optimizer")
        places.append(place)
        rules.append(rule)
    for place, rule in zip(places, rules):
        if type(rule) is not type(rules[0]):  # of torch's optimizers, only the groups of Adam may need different rules
            updated = [
                f"param_groups[{at}], updated as {type(its).__name__}" for at, its in ((places[0], rules[0]), (place, rule))
            ]
            refuse_unsupported(
                "cannot update parameter groups by different rules: one has another decoupled_weight_decay than the other",
                where=", and ".join(updated),
                needed="the same decoupled_weight_decay in all groups of an optimizer",
                remedy="Make an optimizer of each, and wrap both in one call: ballast.wrap([one, other], model).",
            )
    return rules


def _refuse(where: str, value: Any, needed: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    refuse(f"cannot set an option of a parameter group: it is {shown}", where=where, needed=needed)
