"""Plan a training: memory and time of the placements of a model on a machine. Nothing here needs a GPU, or torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

from ballast.checks import NEXT_LINE, fail
from ballast.errors import OutOfMemoryError
from ballast.formats import preferred
from ballast.models import ModelLike
from ballast.options import Options
from ballast.planning.request import PlanRequest, by_tier, candidates, fastest_plan, fits, ledgers_of, left_of, request_plan
from ballast.planning.result import Plan
from ballast.planning.suggestions import remedy
from ballast.schema import option_name, takes
from ballast.sizes import human_size

Keywords = ParamSpec("Keywords")
Result = TypeVar("Result", covariant=True)


class Planning(Protocol[Keywords, Result]):
    """A function of a model, as type checkers see it: with the keywords of `Options`."""

    def __call__(self, model: ModelLike, *_: Keywords.args, **__: Keywords.kwargs) -> Result: ...


def _typed(options: Callable[Keywords, object]) -> Callable[[Callable[..., Result]], Planning[Keywords, Result]]:
    def typed(function: Callable[..., Result]) -> Planning[Keywords, Result]:
        return cast("Planning[Keywords, Result]", function)

    return typed


@_typed(Options)
@takes(Options)
def plan(model: ModelLike, **options: Any) -> Plan:
    """Find the fastest way to train a model that fits the machine. Needs no GPU.

    >>> import ballast
    >>> plan = ballast.plan("llama-8b", ranks=8, gpu="h100")
    >>> plan.stage, plan.fits, plan.seconds < 10
    (2, True, True)

    `model` is a torch.nn.Module, the name of a known model, or a Hugging Face configuration or shapes by name, as a dict or the
    path of a JSON file ("FILE.json:NAME" for one of several). Sizes and rates are numbers, or "80GiB" and "25GB/s".

    {options}

    Raises OutOfMemoryError (B2004) where nothing fits. The error names the missing memory, and the nearest options that fit.
    """
    return best(request_plan(model, **options))


@_typed(Options)
@takes(Options)
def pareto_front(model: ModelLike, **options: Any) -> list[Plan]:
    """List the plan of `plan()`, and the plans that no other plan beats in both GPU memory and time, fastest first. `plan()`
    explains the options, and the errors if nothing fits.

    >>> import ballast
    >>> plans = ballast.pareto_front("llama-8b", ranks=4, gpu="a100", host_memory="2TiB")
    >>> all(a.seconds <= b.seconds and a.bytes_in("device") > b.bytes_in("device") for a, b in zip(plans, plans[1:]))
    True
    """
    request = request_plan(model, **options)
    plan = best(request)
    return unbeaten(searched(request, also=plan), also=plan)


def best(request: PlanRequest) -> Plan:
    _require_room(request)
    requests = request.by_format()
    found = [plan for each in requests if (plan := fastest_plan(each)) is not None]
    if not found:
        _refuse(requests[-1])
    return preferred(found, lambda plan: plan.seconds)


def searched(request: PlanRequest, *, also: Plan | None = None, fitting: bool = True) -> list[Plan]:
    """Return a plan for each placement that fits, or for all. `also` is a plan that is known already."""
    _require_room(request)
    plans = [
        each.plan(each.coarse.price(placement), ledger=ledger)
        for each in request.by_format()
        for placement, ledger in ledgers_of(each)
        if not fitting or fits(each, ledger, placement)
    ]
    return [also, *(plan for plan in plans if not plan.is_as(also))] if also else plans


def unbeaten(plans: Iterable[Plan], *, also: Plan | None = None) -> list[Plan]:
    """Return the plans of `pareto_front()`. `also` is one of the plans, and is always listed."""
    fitting = (plan for plan in plans if plan.fits)
    plans = sorted(fitting, key=lambda plan: (plan.seconds, plan.bytes_in("device"), plan.bytes_in("host")))
    found: list[Plan] = []
    least = math.inf
    for plan in plans:
        if plan is also or plan.bytes_in("device") < least:
            found.append(plan)
        least = min(least, plan.bytes_in("device"))
    return found


def _require_room(request: PlanRequest) -> None:
    """Raise B2003 where activations leave no memory of a GPU, and B2004 where they, or the outer optimizer, are more than the
    tier that they go to."""
    if request.has_room:
        return
    options, where, left = request.options, request.description.name, left_of(request.options, request.activations)
    tokens = f"for {options.tokens} tokens (estimated)" if isinstance(options.activations.amount, str) else "as given"
    if left["device"] <= 0:
        fail(
            "device_memory",
            f"activations alone are more than a {'rank' if options.is_on_cpu else 'GPU'}'s memory",
            where=where,
            needed=f"{human_size(request.activations['device'])} {tokens}, "
            f"{human_size(options.reserved)} reserved, {human_size(options.left_free['device'])} left free",
            available=human_size(options.hardware.memory),
            remedy=remedy(request),
        )
    if min(left.values()) < 0:
        away = {tier: size for tier, size in request.activations.items() if tier != "device"}
        fail(
            "memory_budget",
            "activations alone are more than a rank may keep there",
            where=where,
            needed=f"{by_tier(away)} {tokens}",
            available=by_tier({tier: options.room[tier] for tier in away}),
            remedy=remedy(request),
        )
    needed, names = request.outer_bytes, {"host_memory": "host", "drive_space": "nvme"}
    missing = [option_name(name, as_flags=request.as_flags) for name in options.not_given if names[name] in needed]
    place = "--outer every=N,offload=TIER" if request.as_flags else "DiLoCo(offload=...)"
    fail(
        "memory_budget",
        "the outer optimizer alone needs more memory than a rank has",
        where=where,
        needed=by_tier(needed),
        available=by_tier({tier: left[tier] for tier in needed}) + (f" ({' and '.join(missing)} not given)" if missing else ""),
        remedy=f"Give it another tier ({place}), or more fragments. {remedy(request)}",
    )


def _reserved(request: PlanRequest) -> str:
    """Name the memory of a rank's device that the planner cannot use."""
    reserved = human_size(request.activations["device"] + request.options.reserved)
    if request.options.is_on_cpu:
        whose = "of each rank are reserved for activations, Python and torch"
    else:
        whose = "of each GPU are reserved for activations and CUDA"
    on_host = request.options.host_reserve
    host_words = f",{NEXT_LINE}and {human_size(on_host)} of its part of the host for the system and torch" if on_host else ""
    option = option_name("headroom", as_flags=request.as_flags)
    headroom = 100 * request.options.headroom
    free = f";{NEXT_LINE}{headroom:g}% of the memory is left free ({option})" if headroom else ""
    return f"{request.description.name}; {reserved} {whose}{host_words}{free}"


def _refuse(request: PlanRequest) -> NoReturn:
    """Raise B2004, with the memory of what comes closest."""
    closest = min((request.exact.needs(placement) for placement in candidates(request)), key=lambda needs: needs["device"])
    what, needed = "the requested placement does not fit", by_tier(closest)
    if request.options.divides_state:
        try:
            request.exact.choose()
        except OutOfMemoryError as error:
            what, needed = "no placement fits", f"{error.needed}, in the one that lacks the least"
    fail(
        "memory_budget",
        what,
        where=_reserved(request),
        needed=needed,
        available=by_tier(request.budget),
        remedy=remedy(request),
    )
