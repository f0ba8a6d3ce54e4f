"""Find the nearest changes with which a model fits, if it does not with the requested options. Each suggestion was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from ballast import _core, searching
from ballast.candidates import candidates, stages
from ballast.errors import OutOfMemoryError
from ballast.formats import GRADIENT_FORMATS, STATE_FORMATS
from ballast.options import MOST, Options, TreatedActivations
from ballast.plan_question import sequence_of
from ballast.plan_request import PlanRequest, fits, left_of, request_of
from ballast.result import Plan
from ballast.sizes import human_size, human_time
from ballast.spelling import all_of

FEWEST_TOKENS = 512
MOST_PARTS = 8  # of a micro-step, in a suggestion that keeps the step's tokens
MOST_CHANGES = 3  # that are tried in all combinations


@dataclass(frozen=True)
class Change:
    """Options as the caller writes them, and what they set."""

    written: tuple[tuple[str, object], ...]
    options: Mapping[str, Any] = field(compare=False)

    @staticmethod
    def of(written: Mapping[str, object], **options: Any) -> Change:
        return Change(tuple(written.items()), options)


Axis = Sequence[Change]  # one option, from the smallest change to the largest


@dataclass(frozen=True)
class Suggestion:
    """Changes with which a step fits, and its plan."""

    changes: Sequence[Change]
    plan: Plan

    def in_words(self, *, as_flags: bool, sequence: int) -> str:
        """Return the options and the speed. `sequence` is that of the request."""
        plan = self.plan
        speed = f"{human_time(plan.seconds)} per step, {plan.tokens_per_second:,.0f} tokens/s"
        cut = f"; sequences are cut from {sequence:,} to {plan.sequence:,} tokens" if plan.sequence < sequence else ""
        return f"{_in_words(self.changes, as_flags=as_flags)}: {speed}{cut}"


def _in_words(changes: Sequence[Change], *, as_flags: bool) -> str:
    options = dict(option for change in changes for option in change.written)  # of an option in two changes, the last counts
    return all_of(list(options.items()), as_flags=as_flags)


def remedy(request: PlanRequest) -> str:
    """Name the fewest changes that fit: of settings on this machine, of the machine, or else of both together. Where three are
    too few, name as few as possible of all. The one with the most tokens a second comes first, because a step may have fewer
    of them."""
    search = Search(request)
    as_flags = request.as_flags
    settings, machine = settings_of(request), machines_for(request.options)
    both = [*settings, *machine]
    found = [*(search.nearest(settings) or search.of_many(settings)), *search.nearest(machine)]
    if all(len(each.changes) > MOST_CHANGES for each in found):
        found += search.nearest(both)
    found = found or search.of_many(both)
    assumed = f"{request.not_given()}. " if request.options.not_given else ""
    if found:
        sequence = sequence_of(request.description, request.options) if request.description.attends else 0
        fastest = sorted(found, key=lambda each: -each.plan.tokens_per_second)
        words = [each.in_words(as_flags=as_flags, sequence=sequence) for each in fastest]
        return f"{assumed}Any of these fits:" + "".join(f"\n  {each}" for each in words)
    tried = ", ".join(_in_words([axis[-1]], as_flags=as_flags) for axis in both)
    return f"{assumed}None of these fits either, alone, in pairs, in threes or all together: {tried}."


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
    if options.keep_gathered > 0:
        axes.append([Change.of({"keep_gathered": 0}, keep_gathered=0)])
    if options.replicas > 1:
        axes.append([Change.of({"replicas": 1}, replicas=1)])
    if request.description.activations and isinstance(options.activations.amount, str):
        axes.append(_smaller_activations(options))
        axes.append(_activations_on_device(request))
        axes.append(_smaller_micro_steps(options))
    states = _after(options.state_format, STATE_FORMATS)
    gradients = _after(options.gradient_format, GRADIENT_FORMATS)
    axes.append([Change.of({"state_format": name}, state_format=(name,)) for name in states])
    axes.append([Change.of({"gradient_format": name}, gradient_format=(name,)) for name in gradients])
    if options.micro_steps > 1:
        axes.append([Change.of({"micro_steps": 1, "update_in_backward": True}, micro_steps=1, update_in_backward=True)])
    elif not options.update_in_backward:
        axes.append([Change.of({"update_in_backward": True}, update_in_backward=True)])
    return [axis for axis in axes if axis]


def _smaller_activations(options: Options) -> Axis:
    """List treatments that need less of the device: other tiers that the machine has, activation checkpointing, and both."""
    away = [tier for tier, size in options.room.items() if size > 0]
    chosen = options.activations.tier
    return _treated(options, ["device", *away] if chosen == "device" else [tier for tier in away if tier == chosen])


def _activations_on_device(request: PlanRequest) -> Axis:
    """List treatments that leave activations on the device, where the tier that they would go to has too little memory."""
    tier = request.options.activations.tier
    has_room = tier == "device" or left_of(request.options, request.activations)[tier] >= 0
    return [] if has_room else _treated(request.options, ["device"])


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
    last = changes[-1]["tokens"] if changes else options.tokens
    changes += [{"tokens": tokens} for tokens in reversed(_doubled(FEWEST_TOKENS, last - 1)) if tokens >= fewest]
    return [Change.of(change, **change) for change in changes]


def _after(allowed: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return the formats that are smaller than all that are allowed."""
    return known[known.index(allowed[-1]) + 1 :]


def machines_for(options: Options) -> list[Axis]:
    """List larger machines: ranks, host memory or drives, doubled again and again."""
    copies = {"replicas": options.replicas} if options.replicas > 1 else {}  # "host" names more of them on more machines
    ranks = _doubled(2 * options.ranks, min(8 * options.ranks, MOST["ranks"]))
    found = options.hardware.memory * options.ranks_of_machine if options.is_on_cpu else options.host_memory or 0
    host = [size for size in _doubled(64 << 30, 4 << 40) if size > found]
    drives = [size for size in _doubled(1 << 40, 64 << 40) if size > (options.drive_space or 0)]
    axes = [
        [Change.of({"ranks": count} | copies, ranks=count) for count in ranks],
        [Change.of({"host_memory": _written(size)}, host_memory=size) for size in host],
        [Change.of({"drive_space": _written(size)}, drive_space=size) for size in drives],
    ]
    return [axis for axis in axes if axis]


def _doubled(first: int, last: int) -> list[int]:
    return [first << i for i in range((last // first).bit_length())]


def _written(size: int) -> str:
    """Write a size as an option, in one word."""
    return human_size(size).replace(" ", "")


class Search:
    """Try changes to a question, each combination once."""

    def __init__(self, request: PlanRequest):
        self._request = request
        self._known: dict[tuple[Change, ...], bool] = {}

    def nearest(self, axes: Sequence[Axis]) -> list[Suggestion]:
        """Return the single changes that fit, or else the pairs, or else the triples."""
        for count in range(1, MOST_CHANGES + 1):
            combined = [self._least(chosen) for chosen in combinations(axes, count)]
            found = [suggestion for changes in combined if changes and (suggestion := self._suggestion(changes))]
            if found:
                return found
        return []

    def of_many(self, axes: Sequence[Axis]) -> list[Suggestion]:
        """Return as few changes as possible of all of them together, if these fit."""
        if not self._fits([axis[-1] for axis in axes]):
            return []
        changes = self._least(self._needed(axes))
        suggestion = self._suggestion(changes) if changes else None
        return [suggestion] if suggestion else []

    def _needed(self, axes: Sequence[Axis]) -> list[Axis]:
        """Leave out axes that are not needed in addition to the others, beginning with the last."""
        needed = list(axes)
        for axis in reversed(axes):
            others = [other for other in needed if other is not axis]
            if self._fits([other[-1] for other in others]):
                needed = others
        return needed

    def _least(self, axes: Sequence[Axis]) -> list[Change] | None:
        """Return the smallest change on each axis that fits with those on the others; None if the largest do not fit."""
        changes = [axis[-1] for axis in axes]
        if not self._fits(changes):
            return None
        for i in reversed(range(len(axes))):
            tries = ([*changes[:i], change, *changes[i + 1 :]] for change in axes[i])
            changes = next(changed for changed in tries if self._fits(changed))
        return changes

    def _changed(self, changes: Sequence[Change]) -> list[PlanRequest]:
        """Return one request for each stage, because a stage with larger shards needs larger tiles to be quick."""
        options = self._request.options
        for change in changes:
            options = replace(options, **change.options)
        return [request_of(replace(options, stage=stage), self._request.description) for stage in reversed(stages(options))]

    def _fits(self, changes: Sequence[Change]) -> bool:
        key = tuple(changes)
        if key not in self._known:
            self._known[key] = any(_has_placement(request) for request in self._changed(changes))
        return self._known[key]

    def _suggestion(self, changes: Sequence[Change]) -> Suggestion | None:
        found = [plan for request in self._changed(changes) if (plan := _plan(request)) is not None]
        return Suggestion(changes, min(found, key=lambda plan: plan.seconds)) if found else None


def _has_placement(request: PlanRequest) -> bool:
    """Return whether a placement fits with large tiles, which are quick. Only the planner's choice divides the
    state among tiers."""
    if not request.has_room:
        return False
    if any(searching.fits(request.coarse.needs(placement), vars(request.budget)) for placement in candidates(request)):
        return True
    return request.options.divides_state and _choice(request.coarse) is not None


def _plan(request: PlanRequest) -> Plan | None:
    """Return the fastest plan, or None where nothing fits with the engine's tiles."""
    if not request.has_room:
        return None
    if not request.options.divides_state:
        fitting = [placement for placement in candidates(request) if fits(request, request.exact.memory(placement), placement)]
        plans = (request.plan(request.exact.price(placement)) for placement in fitting)
        return min(plans, key=lambda plan: plan.seconds, default=None)
    try:
        return request.plan(searching.fastest(request.exact, request.coarse, vars(request.budget)))
    except OutOfMemoryError:
        return None


def _choice(question: _core.Question) -> _core.Choice | None:
    try:
        return question.choose()
    except OutOfMemoryError:
        return None
