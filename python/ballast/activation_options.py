"""Read and check where activations go."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.checks import one_of, refuse, require_directory
from ballast.sizes import Size, parse_size
from ballast.tiers import AWAY, IN_FLIGHT


@dataclass(frozen=True)
class ActivationOptions:
    tier: str  # one of AWAY
    directory: str  # on a drive; empty for the host
    min_bytes: int  # smaller activations stay on the device
    in_flight: int  # bytes on their way: of the device's memory, and of buffers on the host


def read_activation_options(to: str, *, min_bytes: Size = "256KiB", in_flight: Size = IN_FLIGHT) -> ActivationOptions:
    """Read a tier with its directory, such as "nvme:/scratch".

    >>> read_activation_options("host").tier
    'host'
    """
    if not isinstance(to, str):
        refuse(f"{to!r} is no tier for activations", needed='"host" or "nvme:DIRECTORY"')
    tier, _, directory = to.partition(":")
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
