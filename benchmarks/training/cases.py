"""The cases: every stage and tier, and the effect of prefetching and overlapping."""

from typing import NamedTuple


class Case(NamedTuple):
    name: str
    options: tuple[str, ...]  # of the trainer
    against: str  # the name of another case
    ranks: int = 2

    @property
    def on_drive(self) -> bool:
        return "nvme" in self.options

    @property
    def overlaps_with(self) -> str:
        """The part of a step during which the drive can work. Updates come after the backward pass, or in it, and before the
        next forward pass. Parameters are read at any time."""
        if "--parameters" in self.options:
            return "all"
        if "--wait-for-updates" in self.options:
            return "nothing"
        return "backward" if "--update-in-backward" in self.options else "forward"


def case(name: str, options: str, against: str, ranks: int = 2) -> Case:
    return Case(name, tuple(options.split()), against, ranks)


RESIDENT = "stage 0"
STAGE_3 = "stage 3"
STATE_ON_HOST = "stage 3, state on the host"
STATE_ON_DRIVE = "stage 3, state on the drive"
RUN = "stage 3, a run on the drive"
ALL_ON_DRIVE = "stage 3, all on host and drive"
ALONE = "one rank, resident"

_ON_DRIVE = "--stage 3 --state nvme"
_LITTLE_RESIDENT = "--stage 3 --parameters nvme --gradients host --state nvme"
_ALL = f"{_LITTLE_RESIDENT} --prefetch 2"

CASES = [
    case(RESIDENT, "--stage 0", RESIDENT),
    case("stage 1", "--stage 1", RESIDENT),
    case("stage 2", "--stage 2", RESIDENT),
    case(STAGE_3, "--stage 3", RESIDENT),
    case("stage 3, without prefetching", "--stage 3 --prefetch 0", STAGE_3),
    case(STATE_ON_HOST, "--stage 3 --gradients host --state host", STAGE_3),
    case("stage 3, all on the host", "--stage 3 --parameters host --gradients host --state host", STAGE_3),
    case(STATE_ON_DRIVE, _ON_DRIVE, STAGE_3),
    case(f"{STATE_ON_DRIVE}, steps waited for", f"{_ON_DRIVE} --wait-for-updates", STATE_ON_DRIVE),
    case(f"{STATE_ON_DRIVE}, updated in backward", f"{_ON_DRIVE} --update-in-backward", STATE_ON_DRIVE),
    case(f"{STATE_ON_DRIVE}, compact", f"{_ON_DRIVE} --state-format compact", STATE_ON_DRIVE),
    case(RUN, f"{_ON_DRIVE} --run kept", STATE_ON_DRIVE),
    case(f"{RUN}, mirrored", f"{_ON_DRIVE} --run kept --mirror", RUN),
    case(ALL_ON_DRIVE, _ALL, STATE_ON_DRIVE),
    case(f"{ALL_ON_DRIVE}, without prefetching", f"{_LITTLE_RESIDENT} --prefetch 0", ALL_ON_DRIVE),
    case(f"{ALL_ON_DRIVE}, updated in backward", f"{_ALL} --update-in-backward", ALL_ON_DRIVE),
    case(ALONE, "--stage 0", ALONE, ranks=1),
    case("one rank, state on the drive", _ON_DRIVE, ALONE, ranks=1),
    case("one rank, state on the drive, updated in backward", f"{_ON_DRIVE} --update-in-backward", ALONE, ranks=1),
    case("one rank, all on host and drive", _ALL, ALONE, ranks=1),
]
