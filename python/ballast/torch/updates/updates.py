"""How updates are made, and where the optimizer's state is: what all kinds of optimizers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ballast import _core
from ballast.torch.memory import TORCH_DTYPES, tensor_of
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.updates.sharded_state import Rule, ShardedState, State

Group = Mapping[str, Any]  # an entry of param_groups
MakeRule = Callable[[Group], Rule]
Tiles = Sequence[_core.TileToUpdate]
UNCOUNTED = "momentum_buffer"  # torch's SGD and Muon have it in their state, and count no steps: at least one has made it


def elements_in(
    tile: _core.TileToUpdate, shards: ShardedState, factor: float
) -> Iterator[tuple[UnitParameter, slice, torch.Tensor, torch.Tensor]]:
    """Yield each member that the step updates with elements in a tile, their range in the tile, and there its masters and its
    gradients, multiplied by the factor."""
    gradients = tensor_of(tile.gradients, TORCH_DTYPES[tile.gradient_dtype])
    masters = tensor_of(tile.masters, torch.float32)
    for member, begin, count in shards.in_tile(tile):
        where = slice(begin, begin + count)
        own = gradients[where].to(masters.device, torch.float32)  # on a GPU the library may be copying them to the host
        yield member, where, masters[where], own.mul_(factor)


class Updates:
    """The differences between optimizers. Methods that are empty here concern only some of them."""

    # Names of state that a rank keeps in full for each parameter of which it has elements, whatever its shape is.
    whole_values: frozenset[str] = frozenset()

    has_custom_step = True  # the optimizer's own step makes the updates; else a rule of the library

    rule: MakeRule  # the rule of a group as it is now

    def custom_step(self, optimizer: Optimizer, shards: ShardedState, tiles: Tiles, factor: float, is_last: bool) -> None:
        """Run the optimizer's own step between the library's sum of gradients, of which it uses those times `factor`, and its
        use of the new parameters. A training step makes several calls where state is on drives."""
        raise NotImplementedError

    def prepare(self, optimizer: Optimizer) -> None:
        """Look at the optimizer's groups as they are now, before a partition is made."""

    def moments(self, optimizer: Optimizer) -> list[tuple[_core.Moment, str]]:
        """Return the moments that the library keeps, with torch's names."""
        return []

    # --- State ---

    def begin(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        """Take the state over, and show it in optimizer.state. All ranks do this together."""
        raise NotImplementedError

    def install(self, optimizer: Optimizer, shards: ShardedState, state: State) -> None:
        """Take over what a checkpoint has of this rank's state of its own step, apart from what the library keeps."""

    def unbegun(self, shards: ShardedState) -> list[torch.nn.Parameter]:
        """Return the parameters that have no state in torch yet, but entries of zeros in optimizer.state. An optimizer's own
        step makes the entries."""
        return []

    def changed_state(self, optimizer: Optimizer, shards: ShardedState) -> State | None:
        """Return optimizer.state if state that the library keeps was removed from it or replaced; else None."""
        return None

    def take_out(self, optimizer: Optimizer, shards: ShardedState) -> State:
        """Return the full state outside the library's memory, on every rank."""
        raise NotImplementedError

    def forget_partition(self) -> None:
        """Forget the partition's memory, which is about to be freed."""
        raise NotImplementedError

    def offload(self, optimizer: Optimizer) -> None:
        """Move state outside the library's memory to the host, until the next step."""

    def state_bytes(self, optimizer: Optimizer, shards: ShardedState) -> int:
        """Return the bytes of this rank's state outside the library's memory."""
        return 0

    # --- What commits of a run say ---

    def keep_metadata(self, shards: ShardedState, state: State) -> None:
        """Keep what the library does not know of this state with the commits of a new partition."""

    def resume_metadata(self, shards: ShardedState) -> None:
        """Take over the counts of steps from the commit of a run that was resumed. An optimizer's own step counts its steps."""
        for member in shards.members:
            member.missed = 0

    def join_metadata(self, metadata: Sequence[bytes], places: Sequence[int]) -> bytes:
        """Return the metadata with which a run of other ranks continues, from those of all of them. `places` has the place of
        each trained parameter in these."""
        return b""


def merged(one: State, other: State) -> State:
    """Return the union of two states, which may have different values of one parameter."""
    both = {key: {**one.get(key, {}), **other.get(key, {})} for key in {**one, **other}}
    return {key: values for key, values in both.items() if values}


def steps_in(state: State) -> dict[int, int]:
    """Return the count of steps of each parameter whose state has one; 1 for momentum that torch does not count."""
    steps = {key: 1 for key, values in state.items() if isinstance(values.get(UNCOUNTED), torch.Tensor)}
    for key, values in state.items():
        count = values.get("step")
        if isinstance(count, (int, float)) or (isinstance(count, torch.Tensor) and count.numel() == 1):
            steps[key] = int(count)
    return steps
