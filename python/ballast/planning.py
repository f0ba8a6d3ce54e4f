"""Plan a training: memory and time of the placements of a model on a machine. Nothing here needs a GPU, or torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ballast import _core
from ballast.candidates import candidates, stages
from ballast.checks import NEXT_LINE, fail
from ballast.errors import OutOfMemoryError
from ballast.formats import preferred
from ballast.keywords import with_keywords_of
from ballast.models import ModelLike
from ballast.option_text import name_of, with_value
from ballast.options import Options
from ballast.plan_request import PlanRequest, fits, left_of, request_plan
from ballast.result import Plan
from ballast.searching import by_tier, fastest
from ballast.sizes import human_size, human_time
from ballast.suggestions import remedy

WORTH_A_NOTE = 0.99  # of the time of a step
RESERVED_ON_GPU = "of each GPU are reserved for activations and CUDA"


@with_keywords_of(request_plan)
def plan(model: ModelLike, **options: Any) -> Plan:
    """Find the fastest way to train a model that fits the machine. Needs no GPU.

    >>> import ballast
    >>> plan = ballast.plan("llama-8b", ranks=8, gpu="h100")
    >>> plan.stage, plan.fits, plan.seconds < 10
    (2, True, True)

    `model` is a torch.nn.Module, a Hugging Face configuration (a dict, an object of transformers, or the path of its JSON
    file), the name of a known model, or the shapes of its tensors by name (a dict, or the path of a JSON file). One of several
    models in a file is "FILE.json:NAME". Sizes and rates are numbers, or text such as "80GiB" and
    "25GB/s".

    ranks               the number of GPUs in all
    gpus_per_machine    GPUs of one machine, which share its host memory and drives
    stage               0 to 3; "auto": the planner chooses
    offload             "auto": the planner chooses; "none", "host", "nvme"; or a tier, or fractions of tiers, for each of
                        "parameters", "gradients" and "state"
    gpu                 the name of a GPU, such as "h100"; by default "a100", the measured one, or a GPU without a name that
                        `gpu_memory` and `flops` describe
    gpu_memory          replaces the memory of that GPU
    flops               replaces its peak in bf16, such as "990T"
    host_memory         of a machine, of which a 64th, 4 GiB, and 2 GiB for each rank are left to the system and torch (an
                        eighth at most, but a 64th and 2 GiB at least); without it nothing is kept on the host. It replaces the
                        memory of measured CPUs
    drive_space         free space on the drives of a machine; without it nothing is kept there
    measured            a file of `ballast bench --output`: its rates, flops and memory replace the usual ones
    rates               replaces measured or usual rates by name, such as {"read": "3GB/s"}
    reserve             memory of each GPU for CUDA, NCCL and the allocator's gaps. None: 2 GiB, and more where NVLink joins the
                        ranks of a machine: 5 GiB for 8 of them. On measured CPUs it is 384 MiB, for Python and torch
    headroom            the fraction of the memory of each GPU, and of the host, that is left free: activations are estimated
    activations         "checkpointed" (None) or "kept", both of them estimated; or a size. With ",host" or ",nvme" they leave
                        the device until backward, as with `wrap(activations=)`; "host" alone means "kept,host"
    tokens              tokens of one rank in one micro-step
    sequence            tokens that attend to each other; at most `tokens`. None: 4096, or the most that the model takes
    micro_steps         backward passes of one step
    efficiency          the fraction of the GPU's peak that the model's arithmetic reaches; 0.5, and 1 of measured flops
    optimizer           "adamw", or another optimizer that the library knows; with "muon", AdamW has all that is no matrix
                        of a block
    state_format        the format of the optimizer's state: "fp32", "split", "bf16", "compact" or "4bit"; several of them,
                        or "auto" for all: the planner takes the most exact ones that cost at most 5 % of a step
    gradient_format     the format of the reduced gradients of bf16 parameters: "fp32" or "bf16"; both, or "auto"
    wire                what ranks send, as with `wrap(wire=)`: "exact", "int8", or formats by kind
    replicas            in stage 3, "host" for a copy of the parameters in each machine, or a number of copies, as with
                        `wrap(replicas=)`
    prefetch            in stage 3, how many units are gathered ahead, as with `wrap(prefetch=)`
    keep_gathered       in stage 3, True keeps parameters from forward to backward, as with `wrap(keep_gathered=)`; or a size
    outer               a `ballast.DiLoCo`: hosts train on their own, as with `wrap(outer=)`. The plan counts its memory, and
                        the time of an exchange, divided by the steps from one to the next
    dtype               the parameters' format; None: the model's own
    update_in_backward  True: a unit is updated as soon as its gradients are reduced, as with `wrap(update_in_backward=)`, which
                        does so in stage 3 only; excludes clipping, and needs one micro-step
    resumable           True: all state is on drives, with the parameters, as with `wrap(run=...)`
    price               of one GPU for an hour, in any currency: the plan has the cost of a million tokens on all ranks
    train_tokens        tokens of the whole training, such as "15T": the plan has its seconds and, with a price, its cost

    Raises OutOfMemoryError (B2004) where nothing fits. The error names the missing memory, and the nearest options that fit.
    """
    return best(request_plan(model, **options))


@with_keywords_of(request_plan)
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
    """Return the plan of `plan()`."""
    _require_room(request)
    requests = request.of_each_format()
    found = [plan for each in requests if (plan := _fastest(each)) is not None]
    if not found:
        _refuse(requests[-1])
    chosen = preferred(found, lambda plan: plan.seconds)
    return replace(chosen, notes=(*chosen.notes, *_notes_of_kept(request, chosen)))


def _notes_of_kept(request: PlanRequest, plan: Plan) -> list[str]:
    """Return a note where the placement of the plan fits without activation checkpointing, too, and is faster."""
    placement = plan.core_placement
    if not request.offers_kept or request.description.activations is None or placement is None:
        return []
    kept = request.with_kept_activations(plan)
    if not kept.has_room or not fits(kept, kept.exact.memory(placement), placement):
        return []
    seconds = kept.plan(kept.exact.price(placement)).seconds
    option = with_value("activations", "kept", as_flags=request.as_flags)
    return [f"{option} fits too: {human_time(seconds)} per step"] if seconds < WORTH_A_NOTE * plan.seconds else []


def searched(request: PlanRequest, *, also: Plan | None = None, fitting: bool = True) -> list[Plan]:
    """Return a plan for each placement that fits, or for all. `also` is a plan that is known already."""
    _require_room(request)
    plans = [
        each.plan(each.coarse.price(placement), ledger=ledger)
        for each in request.of_each_format()
        for placement, ledger in _with_memory(each)
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


def _with_memory(request: PlanRequest) -> Iterator[tuple[_core.Placement, list[_core.LedgerEntry]]]:
    return ((placement, request.exact.memory(placement)) for placement in candidates(request))


def _fastest(request: PlanRequest) -> Plan | None:
    """Return the fastest plan with the request's formats, if one fits."""
    if request.options.outer is not None and request.options.stage is None:
        in_stages = [plan for stage in stages(request.options) if (plan := _fastest_in(request, stage)) is not None]
        return min(in_stages, key=lambda plan: plan.seconds, default=None)
    if request.options.divides_state:
        try:
            return request.plan(fastest(request.exact, request.coarse, vars(request.budget)))
        except OutOfMemoryError:
            return None
    question = request.coarse if request.options.chooses_tiers else request.exact
    fitting = (placement for placement, ledger in _with_memory(request) if fits(request, ledger, placement))
    choices = (question.price(placement) for placement in fitting)
    choice = min(choices, key=lambda choice: choice.simulation.seconds, default=None)
    if choice is None:
        return None
    return request.plan(choice if question is request.exact else request.exact.price(choice.placement))


def _fastest_in(request: PlanRequest, stage: int) -> Plan | None:
    """Return the fastest plan in a stage. In stage 0 each rank has all of the outer optimizer's state, which may not fit."""
    of_stage = request.of_stage(stage)
    return _fastest(of_stage) if of_stage.has_room else None


def _require_room(request: PlanRequest) -> None:
    """Raise B2003 where activations leave no memory of a GPU, and B2004 where they, or the outer optimizer, are more than the
    tier that they go to."""
    if request.has_room:
        return
    left = left_of(request.options, request.activations)
    if left["device"] <= 0:
        _refuse_activations(request)
    elif min(left.values()) < 0:
        _refuse_offloaded_activations(request)
    else:
        _refuse_outer(request, left)


def _refuse_activations(request: PlanRequest) -> NoReturn:
    options = request.options
    problem = _core.Problem(
        what=f"activations alone are more than a {'rank' if options.is_on_cpu else 'GPU'}'s memory",
        where=request.description.name,
        needed=f"{human_size(request.activations['device'])} {_tokens(options)}, "
        f"{human_size(options.reserved)} reserved, {human_size(options.left_free['device'])} left free",
        available=human_size(options.hardware.memory),
        remedy=remedy(request),
    )
    fail("device_memory", problem)


def _refuse_offloaded_activations(request: PlanRequest) -> NoReturn:
    has = request.options.room
    away = {tier: size for tier, size in request.activations.items() if tier != "device"}
    problem = _core.Problem(
        what="activations alone are more than a rank may keep there",
        where=request.description.name,
        needed=f"{by_tier(away)} {_tokens(request.options)}",
        available=by_tier({tier: has[tier] for tier in away}),
        remedy=remedy(request),
    )
    fail("memory_budget", problem)


def _refuse_outer(request: PlanRequest, left: Mapping[str, int]) -> NoReturn:
    needed = request.of_outer
    names = {"host_memory": "host", "drive_space": "nvme"}
    missing = [name for name in request.options.not_given if names[name] in needed]
    problem = _core.Problem(
        what="the outer optimizer alone needs more memory than a rank has",
        where=request.description.name,
        needed=by_tier(needed),
        available=by_tier({tier: left[tier] for tier in needed}) + (f" ({' and '.join(missing)} not given)" if missing else ""),
        remedy=f"Name another tier for it with its option offload, or more fragments. {remedy(request)}",
    )
    fail("memory_budget", problem)


def _tokens(options: Options) -> str:
    return f"for {options.tokens} tokens (estimated)" if isinstance(options.activations.amount, str) else "as given"


def _reserved(request: PlanRequest) -> str:
    """Name the memory of a rank's device that the planner cannot use."""
    reserved = human_size(request.activations["device"] + request.options.reserved)
    whose = "of each rank are reserved for activations, Python and torch" if request.options.is_on_cpu else RESERVED_ON_GPU
    on_host = request.options.host_reserve
    of_host = f",{NEXT_LINE}and {human_size(on_host)} of its part of the host for the system and torch" if on_host else ""
    option = name_of("headroom", as_flags=request.as_flags)
    headroom = 100 * request.options.headroom
    free = f";{NEXT_LINE}{headroom:g}% of the memory is left free ({option})" if headroom else ""
    return f"{request.description.name}; {reserved} {whose}{of_host}{free}"


def _refuse(request: PlanRequest) -> NoReturn:
    """Raise B2004, with the memory of what comes closest."""
    closest = min((request.exact.needs(placement) for placement in candidates(request)), key=lambda needs: needs["device"])
    what, needed = "the requested placement does not fit", by_tier(closest)
    if request.options.divides_state:
        try:
            request.exact.choose()
        except OutOfMemoryError as error:
            what, needed = "no placement fits", f"{error.needed}, in the one that lacks the least"
    problem = _core.Problem(
        what=what,
        where=_reserved(request),
        needed=needed,
        available=by_tier(vars(request.budget)),
        remedy=remedy(request),
    )
    fail("memory_budget", problem)
