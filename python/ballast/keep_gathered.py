"""How far ahead parameters are gathered in stage 3, and how many of them are kept from forward to backward."""

from __future__ import annotations

import sys
from typing import Literal

from ballast.checks import read_count, refuse_value
from ballast.sizes import Size, parse_size

KeepGathered = bool | Size | Literal["all"]

MOST_UNITS = 1_000_000  # more than any model has
ALL = sys.maxsize  # more than any model takes; the library reserves no more than all units take


def read_keep_gathered(given: KeepGathered, stage: int | None) -> int:
    """Return the bytes for gathered parameters; 0 means as many as prefetching needs, which is the least.

    >>> read_keep_gathered("4GiB", 3), read_keep_gathered(False, 2), read_keep_gathered("all", None) == ALL
    (4294967296, 0, True)
    """
    size = ALL if given is True or given == "all" else 0 if given is False else parse_size(given)
    if size > 0:
        require_stage_3("keep_gathered", given, stage)
    return size


def read_prefetch(given: int, stage: int | None) -> int:
    """Return how many units are gathered ahead."""
    units = read_count("prefetch", given, least=0, most=MOST_UNITS, needed="a number of units")
    if units != 1:
        require_stage_3("prefetch", given, stage)
    return units


def require_stage_3(name: str, given: object, stage: int | None) -> None:
    if stage is not None and stage < 3:
        why = f"in stage {stage} each rank keeps all parameters"
        refuse_value(name, given, f"stage 3, or no {name}", why=why)


def as_given(size: int) -> bool | int:
    """Return the option that is read as these bytes.

    >>> as_given(0), as_given(1 << 30), as_given(ALL)
    (False, 1073741824, True)
    """
    return size == ALL or size or False
