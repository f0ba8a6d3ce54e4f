"""Find the nearest changes with which a model fits, if it does not with the requested options. Each suggestion was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import combinations
from typing import Any

from ballast.errors import OutOfMemoryError
from ballast.formats import GRADIENT_FORMATS, STATE_FORMATS
from ballast.options import MOST, Options, TreatedActivations
from ballast.planning.request import (
    USUAL_SEQUENCE,
    PlanRequest,
    candidates,
    fastest_plan,
    has_room_for,
    left_of,
    sequence_of,
    stages,
)
from ballast.planning.result import Plan, wrapped
from ballast.schema import changed, options_text
from ballast.sizes import human_size, human_time

FEWEST_TOKENS = 512
LOSS_CHUNK = 512  # tokens, whose logits of 152,064 words take 0.9 GB
MOST_PARTS = 8  # a suggestion that keeps the step's tokens divides a micro-step into no more
MOST_CHANGES = 3  # changes that are tried in all combinations
MOST_LISTED = 5  # suggestions
MORE_SPEED = 1.02  # relative to a plan, from which on a change is listed as faster


class Asks(IntEnum):
    """What a change asks of the caller, the least first."""

    NOTHING = 0  # the training computes the same, on the same machine
    DRIVES = 1
    OTHER_TRAINING = 2  # smaller formats, or fewer tokens in a step
    HOST_MEMORY = 3
    RANKS = 4


@dataclass(frozen=True)
class Change:
    """Options as the caller writes them, and what they set."""

    written: tuple[tuple[str, object], ...]
    options: Mapping[str, Any] = field(compare=False)
    asks: Asks = Asks.NOTHING

    @staticmethod
    def of(written: Mapping[str, object], asks: Asks = Asks.NOTHING, **options: Any) -> Change:
        return Change(tuple(written.items()), options, asks)


Axis = Sequence[Change]  # one option, from the smallest change to the largest
Changes = Sequence[Change]  # several options


@dataclass(frozen=True)
class Suggestion:
    """Changes with which a step fits, and its plan."""

    changes: Changes
    plan: Plan

    def describe(self, *, as_flags: bool, sequence: int) -> str:
        """Return the options and the speed. `sequence` is that of the request."""
        plan = self.plan
        speed = f"{human_time(plan.seconds)} per step, {plan.tokens_per_second:,.0f} tokens/s"
        cut = f"; sequences are cut from {sequence:,} to {plan.sequence:,} tokens" if plan.sequence < sequence else ""
        return f"{_describe(self.changes, as_flags=as_flags)}: {speed}{cut}"


def _describe(changes: Changes, *, as_flags: bool) -> str:
    options = dict(option for change in changes for option in change.written)  # the last counts of two changes of an option
    return options_text(list(options.items()), as_flags=as_flags)


def remedy(request: PlanRequest) -> str:
    """Name the changes that fit, of settings and of the machine: single ones and pairs, or else three, or else as few as
    possible of all. Those that leave the machine as it is are named even where three or more are needed, and four of them where
    three would cut sequences."""
    search = Search(request)
    as_flags = request.as_flags
    settings, machine = settings_of(request), machines_for(request.options)
    both = [*settings, *machine]
    found = search.fewest(both, most=2)
    whole = sequence_of(request.description, request.options) if request.description.attends else 0
    if not any(all(each.asks in (Asks.NOTHING, Asks.OTHER_TRAINING) for each in changes) for changes in found):
        same_machine = search.fewest(settings, least=3) or [*filter(None, [search.least(settings, may_drop=True)])]
        if same_machine and all(_cuts(changes, whole) for changes in same_machine):
            same_machine += [each for each in search.fewest(settings, least=4, most=4) if not _cuts(each, whole)]
        found += same_machine
    found = found or search.fewest(both, least=3) or [*filter(None, [search.least(both, may_drop=True)])]
    plans = search.plans(sorted(found, key=_asked)[:MOST_LISTED])
    assumed = f"{request.not_given()}. " if request.options.not_given else ""
    if plans:
        first = sorted(plans, key=lambda each: (_asked(each.changes), -each.plan.tokens_per_second))
        words = (each.describe(as_flags=as_flags, sequence=whole) for each in first)
        lines = (line for each in words for line in wrapped(each, first="  ", indent=" " * 6))
        return "\n".join([f"{assumed}Any of these fits:", *lines])
    tried = "".join(f"\n  {_describe([axis[-1]], as_flags=as_flags)}" for axis in both)
    return f"{assumed}None of these fits either, alone, in pairs, in threes or all together:{tried}"


def faster(request: PlanRequest, plan: Plan) -> list[str]:
    """Describe each setting that makes the training faster than the plan does and leaves its values as they are, the fastest
    first. Updates in the backward pass exclude clipping."""
    changes = [[axis[0]] for axis in settings_of(request) if axis[0].asks == Asks.NOTHING]
    if request.offers_kept and request.description.activations is not None:
        changes.append([Change.of({"activations": "kept"}, activations=TreatedActivations("kept", "device"))])
    plans = Search(request).plans(changes)
    plans = [each for each in plans if each.plan.tokens_per_second > MORE_SPEED * plan.tokens_per_second]
    plans.sort(key=lambda each: -each.plan.tokens_per_second)
    return [each.describe(as_flags=request.as_flags, sequence=plan.sequence) for each in plans]


def _asked(changes: Changes) -> tuple[Asks, int]:
    """Return what changes ask of the caller, in order: the least comes first, then fewer changes."""
    return max(change.asks for change in changes), len(changes)


def _cuts(changes: Changes, sequence: int) -> bool:
    return any(change.options.get("tokens", sequence) < sequence for change in changes)


def settings_of(request: PlanRequest) -> list[Axis]:
    """List smaller settings for the same machine. Those that change the training come last."""
    options = request.options
    axes: list[Axis] = []
    if options.stage is not None:
        axes.append([Change.of({"stage": "auto"}, stage=None)])
    if options.offload != "auto":
        axes.append([Change.of({"offload": "auto"}, offload="auto")])
    if options.prefetch > 1:
        axes.append([Change.of({"prefetch": 1}, prefetch=1)])
    if options.keep_gathered:
        axes.append([Change.of({"keep_gathered": 0}, keep_gathered=0)])
    if options.parameter_replicas > 1:
        axes.append([Change.of({"replicas": 1}, replicas=1)])
    if request.description.activations and isinstance(options.activations.amount, str):
        away = [tier for tier, size in options.room.items() if size > 0]
        treated = options.activations.tier
        # Less of the device: other tiers that the machine has, activation checkpointing, and both.
        axes.append(_treated(options, ["device", *away] if treated == "device" else [tier for tier in away if tier == treated]))
        if treated != "device" and left_of(options, request.activations)[treated] < 0:
            axes.append(_treated(options, ["device"]))
        if request.description.activations.vocabulary and options.loss_chunk is None and options.tokens > LOSS_CHUNK:
            axes.append([Change.of({"loss_chunk": LOSS_CHUNK}, loss_chunk=LOSS_CHUNK)])
        axes.append(_smaller_micro_steps(options))
    states = _after(options.state_formats, STATE_FORMATS)
    gradients = _after(options.gradient_format, GRADIENT_FORMATS)
    axes.append([Change.of({"state_format": name}, Asks.OTHER_TRAINING, state_format=(name,)) for name in states])
    axes.append([Change.of({"gradient_format": name}, Asks.OTHER_TRAINING, gradient_format=(name,)) for name in gradients])
    if options.micro_steps > 1:
        axes.append([Change.of({"micro_steps": 1, "update_in_backward": True}, micro_steps=1, update_in_backward=True)])
    elif not options.update_in_backward:
        axes.append([Change.of({"update_in_backward": True}, update_in_backward=True)])
    return [axis for axis in axes if axis]


def _treated(options: Options, tiers: Sequence[str]) -> Axis:
    """List changes to activations in these tiers: the requested treatment first."""
    kept = [("kept", tier) for tier in tiers] if options.activations.amount == "kept" else []
    smaller = []
    for amount, tier in [*kept, *(("checkpointed", tier) for tier in tiers)]:
        if (amount, tier) != options.activations:
            words = amount if tier == "device" else f"{amount},{tier}"
            smaller.append(Change.of({"activations": words}, activations=TreatedActivations(amount, tier)))
    return smaller


def _smaller_micro_steps(options: Options) -> Axis:
    """List smaller micro-steps: at first more of them with the same tokens in all, then fewer tokens."""
    fewest = max(FEWEST_TOKENS, options.sequence or 0)  # nothing cuts what the caller named
    most_parts = min(MOST_PARTS, options.tokens // fewest, MOST["micro_steps"] // options.micro_steps)
    parts = [count for count in range(2, most_parts + 1) if options.tokens % count == 0]
    changes = [{"tokens": options.tokens // count, "micro_steps": count * options.micro_steps} for count in parts]
    changes += [{"tokens": tokens} for tokens in reversed(_doubled(FEWEST_TOKENS, options.tokens - 1)) if tokens >= fewest]
    whole = options.sequence or USUAL_SEQUENCE

    def asks(change: Mapping[str, int]) -> Asks:
        return Asks.NOTHING if "micro_steps" in change and change["tokens"] >= whole else Asks.OTHER_TRAINING

    return [Change.of(change, asks(change), **change) for change in changes]


def _after(allowed: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return the formats that are smaller than all that are allowed."""
    return known[known.index(allowed[-1]) + 1 :]


def machines_for(options: Options) -> list[Axis]:
    """List larger machines: ranks, host memory or drives, doubled again and again."""
    copies = options.parameter_replicas
    same = {"replicas": copies} if copies > 1 else {}  # "host" names more of them on more machines
    ranks = _doubled(2 * options.ranks, min(8 * options.ranks, MOST["ranks"]))
    found = options.hardware.memory * options.ranks_of_machine if options.is_on_cpu else options.host_memory or 0
    is_larger = options.is_on_cpu or not options.has_one_pool  # than a GPU's own
    host = [size for size in _doubled(64 << 30, 4 << 40) if size > found and is_larger]
    drives = [size for size in _doubled(1 << 40, 64 << 40) if size > (options.drive_space or 0)]
    axes = [
        [Change.of({"ranks": count} | same, Asks.RANKS, ranks=count) for count in ranks],
        [Change.of({"host_memory": _written(size)}, Asks.HOST_MEMORY, host_memory=size) for size in host],
        [Change.of({"drive_space": _written(size)}, Asks.DRIVES, drive_space=size) for size in drives],
    ]
    return [axis for axis in axes if axis]


def _doubled(first: int, last: int) -> list[int]:
    return [first << i for i in range((last // first).bit_length())]


def _written(size: int) -> str:
    return human_size(size).replace(" ", "")


class Search:
    """Try changes to a question, each combination once."""

    def __init__(self, request: PlanRequest):
        self._request = request
        self._known: dict[tuple[Change, ...], bool] = {}

    def fewest(self, axes: Sequence[Axis], *, least: int = 1, most: int = MOST_CHANGES) -> list[Changes]:
        """Return the combinations of so many changes that fit, without those that have more changes than they need."""
        found: list[Changes] = []
        for count in range(least, most + 1):
            for chosen in combinations(axes, count):
                changes = self.least(chosen)
                if changes and not any(set(other) <= set(changes) for other in found):
                    found.append(changes)
        return found

    def plans(self, found: Sequence[Changes]) -> list[Suggestion]:
        suggestions = []
        for changes in found:
            plans = [plan for request in self._changed(changes) if (plan := fastest_plan(request)) is not None]
            suggestions += [Suggestion(changes, min(plans, key=lambda plan: plan.seconds))] if plans else []
        return suggestions

    def least(self, axes: Sequence[Axis], *, may_drop: bool = False) -> Changes:
        """Return the smallest change on each axis that fits with those on the others; nothing if the largest do not fit. With
        `may_drop`, there is none on an axis that is not needed in addition to the others."""
        before = [axis[-1] for axis in axes]
        least: list[Change] = []
        if not self._fits(before):
            return least
        for axis in reversed(axes):
            del before[-1]
            tries = [[change, *least] for change in axis]
            least = next(each for each in ([least, *tries] if may_drop else tries) if self._fits([*before, *each]))
        return least

    def _changed(self, changes: Changes) -> list[PlanRequest]:
        """Return one request for each stage, because a stage with larger shards needs larger tiles to be quick."""
        values = {name: value for change in changes for name, value in change.options.items()}
        known = reversed(stages(changed(self._request.options, **values)))
        return [self._request.changed(**{**values, "stage": stage}) for stage in known]

    def _fits(self, changes: Changes) -> bool:
        key = tuple(changes)
        if key not in self._known:
            self._known[key] = any(_has_placement(request) for request in self._changed(changes))
        return self._known[key]


def _has_placement(request: PlanRequest) -> bool:
    """Return whether a placement fits with large tiles, which are quick. Only the planner's choice divides the
    state among tiers."""
    if not request.has_room:
        return False
    if any(has_room_for(request.coarse.needs(placement), request.budget) for placement in candidates(request)):
        return True
    with suppress(OutOfMemoryError):
        return request.options.divides_state and request.coarse.choose() is not None
    return False
