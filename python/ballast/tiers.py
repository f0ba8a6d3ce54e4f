"""The tiers of parameters, gradients, optimizer state and activations, as users write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast import _core
from ballast.checks import is_number, one_of, refuse, require_directory
from ballast.sizes import Size, parse_size

KINDS = ("parameters", "gradients", "state")
TIERS = tuple(tier.name for tier in _core.Tier)
AWAY = tuple(tier for tier in TIERS if tier != "device")  # tiers for activations until backward
IN_FLIGHT = "64MiB"  # the default bytes of activations on their way

# A tier, or fractions of tiers. A drive may have its directory ("nvme:/scratch"); several drives have equal fractions.
TierFractions = str | Mapping[str, float]
Offload = str | Mapping[str, TierFractions]


def tiers_by_kind(offload: Offload) -> Mapping[str, TierFractions]:
    """Return the tiers by kind. A tier without kinds is that of the state; the gradients then go to the host."""
    return {"state": offload, "gradients": "host"} if isinstance(offload, str) else offload


def fractions_of(tiers: TierFractions) -> Mapping[str, float]:
    """Return the fractions, by tier and directory as the user writes them.

    >>> fractions_of("host")
    {'host': 1.0}
    """
    if isinstance(tiers, str):
        return {tiers: 1.0}
    if not isinstance(tiers, Mapping) or not tiers:
        refuse(f"{tiers!r} is no tier", needed='a tier, or fractions of tiers such as {"device": 0.25, "host": 0.75}')
    for word, part in tiers.items():
        if not is_number(part):
            refuse(f"{part!r} is no fraction for {word}", needed="fractions that add up to 1")
    drives = {word: part for word, part in tiers.items() if tier_of(word) == "nvme"}
    others = [tier_of(word) for word in tiers if word not in drives]
    if len(set(others)) < len(others) or (len(drives) > 1 and "nvme" in drives):
        refuse(f"{dict(tiers)} names a tier twice", needed="each tier once, and several drives by their directories")
    if len(set(drives.values())) > 1:
        refuse(f"{dict(tiers)} uses drives unequally", needed="equal fractions: tiles are dealt out to all drives in turn")
    return tiers


def fractions_by_tier(tiers: TierFractions) -> dict[str, float]:
    """Return the fraction in each tier.

    >>> fractions_by_tier({"host": 0.5, "nvme:/one": 0.25, "nvme:/other": 0.25})
    {'host': 0.5, 'nvme': 0.5}
    """
    parts: dict[str, float] = {}
    for word, part in fractions_of(tiers).items():
        parts[tier_of(word)] = parts.get(tier_of(word), 0.0) + float(part)
    return parts


def tier_of(word: str) -> str:
    return word.partition(":")[0]


def directory_of(word: str) -> str:
    """Return the directory of a tier; an empty text if it names none. `~` is the user's home, as in a shell.

    >>> directory_of("nvme:/scratch"), directory_of("nvme:~") == os.path.expanduser("~")
    ('/scratch', True)
    """
    return os.path.expanduser(word.partition(":")[2])


def spread_of(tiers: TierFractions) -> _core.Spread:
    """Return the fractions as the C++ library takes them.

    >>> spread_of({"device": 0.25, "nvme:/scratch": 0.75}).nvme
    0.75
    """
    return _core.Spread(**fractions_by_tier(tiers))


def fractions_in(spread: _core.Spread) -> dict[str, float]:
    """Return the fractions that are above 0, by tier."""
    parts = {tier: float(getattr(spread, tier)) for tier in TIERS}
    return {tier: part for tier, part in parts.items() if part > 0}


def state_with_parameters(parameters: Mapping[str, float], state: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of the state by tier, which is no nearer to the device than the parameters that it makes.

    >>> state_with_parameters({"device": 0.25, "host": 0.75}, {"device": 1.0})
    {'device': 0.25, 'host': 0.75}
    >>> state_with_parameters({"device": 0.5, "host": 0.5}, {"device": 0.5, "nvme": 0.5})
    {'device': 0.25, 'host': 0.25, 'nvme': 0.5}
    """
    within = [  # the fractions in a tier and in those that are nearer
        sum(parameters.get(tier, 0.0) for tier in TIERS[: i + 1]) * sum(state.get(tier, 0.0) for tier in TIERS[: i + 1])
        for i in range(len(TIERS))
    ]
    parts = {tier: within[i] - (within[i - 1] if i else 0.0) for i, tier in enumerate(TIERS)}
    return {tier: part for tier, part in parts.items() if part > 0}


def in_words(stage: int, placement: Mapping[str, Mapping[str, float]], *, device: str) -> str:
    """Describe a placement in a few words.

    >>> in_words(3, {"parameters": {"device": 1.0}, "state": {"device": 0.25, "nvme": 0.75}}, device="the GPU")
    'stage 3, state 25% on the GPU and 75% on drives'
    >>> in_words(2, {"state": {"device": 0.0044, "host": 0.9956}}, device="the GPU")
    'stage 2, state 0.4% on the GPU and 99.6% on the host'
    >>> in_words(3, {"parameters": {"host": 1.0}, "gradients": {"host": 1.0}, "state": {"host": 1.0}}, device="the GPU")
    'stage 3, parameters, gradients and state on the host'
    """
    words = {"device": f"on {device}", "host": "on the host", "nvme": "on drives"}

    def spread(parts: Mapping[str, float]) -> str:
        if len(parts) == 1:
            return words[next(iter(parts))]
        digits = 1 if min(parts.values()) < 0.01 else 0
        return " and ".join(f"{part:.{digits}%} {words[tier]}" for tier, part in parts.items())

    kinds: dict[str, list[str]] = {}
    for kind, parts in placement.items():
        if parts.get("device") != 1:
            kinds.setdefault(spread(parts), []).append(kind)
    offloaded = [f"{listed(names)} {where}" for where, names in kinds.items()]
    return ", ".join([f"stage {stage}", *offloaded])


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them.

    >>> listed(["state"]), listed(["parameters", "gradients", "state"])
    ('state', 'parameters, gradients and state')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def lane_in_words(lane: str, *, has_drive: bool) -> str:
    """Return the name of a lane. That of the drives also commits each step, which is all that it does without a drive.

    >>> lane_in_words("disk", has_drive=True), lane_in_words("disk", has_drive=False)
    ('disk', 'commit')
    """
    return "commit" if lane == "disk" and not has_drive else lane


def set_tiers(placement: _core.Placement, offload: Offload) -> None:
    """Set the tiers of a placement. Refuse impossible ones, such as fractions that do not add up to 1."""
    for kind, tiers in tiers_by_kind(offload).items():
        setattr(placement, kind, spread_of(tiers))
    placement.check()


# --- Activations ---


@dataclass(frozen=True)
class ActivationOptions:
    tier: str  # one of AWAY
    directory: str  # a directory on a drive; empty for the host
    min_bytes: int  # smaller activations stay on the device
    in_flight: int  # bytes on their way: of the device's memory, and of buffers on the host


def read_activation_options(to: str, *, min_bytes: Size = "256KiB", in_flight: Size = IN_FLIGHT) -> ActivationOptions:
    """Read a tier with its directory, such as "nvme:/scratch".

    >>> read_activation_options("host").tier
    'host'
    """
    if not isinstance(to, str):
        refuse(f"{to!r} is no tier for activations", needed='"host" or "nvme:DIRECTORY"')
    tier, directory = tier_of(to), directory_of(to)
    one_of("tier for activations", tier, AWAY)
    if tier == "host" and directory:
        refuse(f'cannot keep activations in "{to}": the host has no directories', needed='"host", or "nvme:DIRECTORY"')
    if tier == "nvme" and not directory:
        refuse("cannot keep activations on a drive: no directory is given", needed='a directory, such as "nvme:/scratch"')
    if directory:
        require_directory(directory, where="activations")
    return ActivationOptions(tier, directory, parse_size(min_bytes), parse_size(in_flight))


def require_away_from(options: ActivationOptions, *, on_gpu: bool) -> None:
    """Refuse the host as the tier for activations of the CPU."""
    if options.tier == "host" and not on_gpu:
        refuse(
            "cannot offload activations to the host: on a CPU they are in the host's memory already",
            needed='"nvme:DIRECTORY": on a CPU activations go to a drive only',
        )
