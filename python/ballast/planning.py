"""Planning: a model and a machine in, placements with their memory and time out. Nothing here needs a GPU, or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ballast import _core
from ballast.checks import fail
from ballast.errors import OutOfMemoryError
from ballast.models import ModelLike
from ballast.offer import Offer, fits, offer
from ballast.placements import candidates
from ballast.result import Plan
from ballast.searching import by_tier, fastest
from ballast.sizes import human_size
from ballast.suggestions import remedy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ballast.options import PlanOptions


def plan(model: ModelLike, **options: Unpack[PlanOptions]) -> Plan:
    """The fastest way to train a model that fits. See PlanOptions for the keywords, `describe()` for models.

    Raises OutOfMemoryError (B2004) where nothing fits, with what is short and the nearest changes that fit.

    >>> found = plan("llama-8b", ranks=8, gpu="h100")
    >>> found.stage, found.fits, found.seconds < 10
    (2, True, True)
    """
    return best(offer(model, options))


def front(model: ModelLike, **options: Unpack[PlanOptions]) -> list[Plan]:
    """What memory buys: of the ways that fit, those that no other one beats in both GPU memory and time; fastest first.

    >>> ways = front("llama-8b", ranks=4, gpu="a100", host_memory="2TiB")
    >>> all(a.seconds <= b.seconds and a.bytes_in("device") > b.bytes_in("device") for a, b in zip(ways, ways[1:]))
    True
    """
    asked = offer(model, options)
    return unbeaten(asked)


def best(asked: Offer) -> Plan:
    """What `plan()` answers."""
    _require_room(asked)
    if asked.options.chooses_places:
        return _chosen(asked)
    fitting = _fitting(asked)
    if not fitting:
        _refuse(asked)
    return min((asked.plan(asked.exact.price(placement)) for placement, _ in fitting), key=lambda way: way.seconds)


def unbeaten(asked: Offer, *, also: Plan | None = None) -> list[Plan]:
    """What `front()` answers; `also` is a way that is known already, and stays."""
    _require_room(asked)
    ways = [asked.plan(asked.coarse.price(placement), ledger=ledger) for placement, ledger in _fitting(asked)]
    if also:
        ways = [also, *(way for way in ways if (way.stage, way.places) != (also.stage, also.places))]
    ways.sort(key=lambda way: (way.seconds, way.bytes_in("device"), way.bytes_in("host")))
    found: list[Plan] = []
    for way in ways:
        if way is also or not found or way.bytes_in("device") < found[-1].bytes_in("device"):
            found.append(way)
    return found


def _fitting(asked: Offer) -> list[tuple[_core.Placement, list[_core.LedgerEntry]]]:
    priced = ((placement, asked.exact.memory(placement)) for placement in candidates(asked))
    return [(placement, ledger) for placement, ledger in priced if fits(asked, ledger)]


def _chosen(asked: Offer) -> Plan:
    try:
        return asked.plan(fastest(asked.exact, asked.coarse, vars(asked.budget)))
    except OutOfMemoryError as error:
        nothing_fits = error
    problem = _core.Problem(
        what=nothing_fits.what_happened,
        where=_set_aside(asked),
        needed=nothing_fits.needed,
        available=nothing_fits.available,
        remedy=remedy(asked),
    )
    fail("memory_budget", problem)


def _require_room(asked: Offer) -> None:
    """Raises B2003 where activations leave nothing of a GPU."""
    if asked.budget.device > 0:
        return
    options = asked.options
    memory = options.hardware.memory if options.gpu_memory is None else options.gpu_memory
    tokens = f"for {options.tokens} tokens (estimated)" if asked.activations != options.activations else "as given"
    problem = _core.Problem(
        what="activations alone are more than a GPU's memory",
        where=asked.described.name,
        needed=f"{human_size(asked.activations)} {tokens}, {human_size(options.reserve)} reserved",
        available=human_size(memory),
        remedy=remedy(asked),
    )
    fail("device_memory", problem)


def _set_aside(asked: Offer) -> str:
    """What of the GPU's memory the planner could not use."""
    taken = human_size(asked.activations + asked.options.reserve)
    return f"{asked.described.name}; {taken} of each GPU are set aside for activations and CUDA"


def _refuse(asked: Offer) -> NoReturn:
    """Of one placement that was asked for."""
    closest = min((asked.exact.needs(placement) for placement in candidates(asked)), key=lambda needs: needs["device"])
    problem = _core.Problem(
        what="what was asked for does not fit",
        where=_set_aside(asked),
        needed=by_tier(closest),
        available=by_tier(vars(asked.budget)),
        remedy=remedy(asked),
    )
    fail("memory_budget", problem)
