"""The states of a parameter, and the transitions between them.

    DEFERRED ── materialise ──> SHARDED <── gather, reshard ──> GATHERED        (stage 3)
                                   │ ▲
                           offload │ │ reload       FULL (stages 0 to 2)        RELEASED at the end
                                   ▼ │
                                OFFLOADED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NoReturn

from ballast import _core
from ballast.checks import fail


class ParameterState(Enum):
    """Where the values of a parameter are."""

    following: tuple[ParameterState, ...]  # from TRANSITIONS; each call of a module needs them, so this look-up uses no hash

    DEFERRED = "deferred"  # nowhere yet: they are made, or read from files, when training begins
    PENDING = "pending"  # not here: a checkpoint, or the migration to the next partition, brings them
    SHARDED = "sharded"  # each rank keeps its shard (stage 3)
    GATHERED = "gathered"  # torch sees all of them, in memory that is acquired for a while (stage 3)
    FULL = "full"  # torch sees all of them, in memory that stays (stages 0 to 2)
    OFFLOADED = "offloaded"  # off the device, until reload()
    RELEASED = "released"  # torch has them in memory of its own: Ballast no longer manages the parameter
    LOST = "lost"  # the training has ended without all of its ranks, and the values with it


TRANSITIONS: Mapping[ParameterState, frozenset[ParameterState]] = {
    ParameterState.DEFERRED: frozenset(
        {ParameterState.PENDING, ParameterState.SHARDED, ParameterState.FULL, ParameterState.RELEASED}
    ),
    ParameterState.PENDING: frozenset(  # DEFERRED: other values are read instead, or nothing brings them any more
        {ParameterState.DEFERRED, ParameterState.SHARDED, ParameterState.FULL, ParameterState.RELEASED}
    ),
    ParameterState.SHARDED: frozenset(  # PENDING: the next partition gets the shard
        {
            ParameterState.GATHERED,
            ParameterState.OFFLOADED,
            ParameterState.PENDING,
            ParameterState.RELEASED,
            ParameterState.LOST,
        }
    ),
    # LOST: an optimizer may be deleted inside a gather() block.
    ParameterState.GATHERED: frozenset({ParameterState.SHARDED, ParameterState.LOST}),
    ParameterState.FULL: frozenset({ParameterState.OFFLOADED, ParameterState.RELEASED}),
    ParameterState.OFFLOADED: frozenset({ParameterState.SHARDED, ParameterState.FULL, ParameterState.LOST}),
    ParameterState.RELEASED: frozenset(),
    # If a partition could not be made, the migration still has the values, or a checkpoint brings others.
    ParameterState.LOST: frozenset({ParameterState.PENDING}),
}


for _state, _following in TRANSITIONS.items():
    _state.following = tuple(_following)


def require_transition(before: ParameterState, after: ParameterState) -> None:
    """Raise B1999 unless this transition exists. Staying in a state is always possible."""
    if after is not before and after not in before.following:
        _refuse(before, after)


def _refuse(before: ParameterState, after: ParameterState) -> NoReturn:
    possible = ", ".join(state.name for state in ParameterState if state in TRANSITIONS[before])
    problem = _core.Problem(
        what=f"cannot change a parameter from {before.name} to {after.name}: there is no such transition",
        needed=f"{before.name} to {possible}" if possible else f"nothing: {before.name} is the end",
    )
    fail("internal", problem)
