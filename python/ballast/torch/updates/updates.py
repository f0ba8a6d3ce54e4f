"""How updates are made, and where the optimizer's state is: the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ballast import _core
from ballast.torch.updates.rules import Group, Rule
from ballast.torch.updates.sharded_state import ShardedState

State = dict[int, dict[str, Any]]  # by id of the parameter, with torch's names
UNCOUNTED = "momentum_buffer"  # in the state of torch's SGD and Muon, which count no steps: at least one has made it


@dataclass(frozen=True)
class StepCall:
    """The tiles of one call of an optimizer's own step. A training step makes several calls where state is on drives."""

    tiles: Sequence[_core.TileToUpdate]
    factor: float  # of the gradients
    is_last: bool


CustomStep = Callable[[torch.optim.Optimizer, ShardedState, StepCall], None]


class Updates(Protocol):
    """The differences between optimizers."""

    # Names of state that a rank keeps in full for each parameter of which it has elements, whatever its shape is.
    whole_values: frozenset[str]

    @property
    def custom_step(self) -> CustomStep | None:
        """The step of the optimizer's own class; None if the library makes updates by a rule."""

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the optimizer's groups as they are now, before a partition is made."""

    def rule(self, group: Group) -> Rule: ...

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        """Return the moments that the library keeps, with torch's names."""

    def begin(self, optimizer: torch.optim.Optimizer, shards: ShardedState, state: State) -> None:
        """Take the state over, and show it in optimizer.state. All ranks do this together."""

    def keep_note(self, shards: ShardedState, state: State) -> None:
        """Keep what the library does not know of this state with the commits of a new partition."""

    def resume_note(self, shards: ShardedState) -> None:
        """Take over the counts of steps from the note of a run that was resumed."""

    def join_notes(self, notes: Sequence[bytes], places: Sequence[int]) -> bytes:
        """Return the note with which a run of other ranks continues, from those of all of them. `places` has the place of each
        trained parameter in these."""

    def install(self, optimizer: torch.optim.Optimizer, shards: ShardedState, state: State) -> None:
        """Take over what a checkpoint has of this rank's state of its own step, apart from what the library keeps."""

    def unbegun(self, shards: ShardedState) -> list[torch.nn.Parameter]:
        """Return the parameters that have no state in torch yet, but entries of zeros in optimizer.state."""

    def changed_state(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> State | None:
        """Return optimizer.state if state that the library keeps was removed from it or replaced; else None."""

    def take_out(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> State:
        """Return the full state outside the library's memory, on every rank."""

    def forget_partition(self) -> None:
        """Forget the partition's memory, which is about to be freed."""

    def offload(self, optimizer: torch.optim.Optimizer) -> None:
        """Move state outside the library's memory to the host, until the next step."""

    def state_bytes(self, optimizer: torch.optim.Optimizer, shards: ShardedState) -> int:
        """Return the bytes of this rank's state outside the library's memory."""


def merged(one: State, other: State) -> State:
    """Return the union of two states, which may have different values of one parameter."""
    both = {key: {**one.get(key, {}), **other.get(key, {})} for key in {**one, **other}}
    return {key: values for key, values in both.items() if values}


def steps_in(state: State) -> dict[int, int]:
    """Return the count of steps of each parameter whose state has one; 1 for momentum that torch does not count."""
    counted = {key: int(values["step"]) for key, values in state.items() if _is_count(values.get("step"))}
    return {**{key: 1 for key, values in state.items() if isinstance(values.get(UNCOUNTED), torch.Tensor)}, **counted}


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
