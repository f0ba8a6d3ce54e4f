"""Hold all parameters of a sharded model for reading, or copy them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ballast.checkpoint.unit_by_unit import begin_owners, by_unit, gathered_unit
from ballast.gathering import gather_to_read
from ballast.torch.calls.hooks import trainer_of
from ballast.torch.parameters.placeholder import plain


@contextmanager
def gathered_to_read(model: torch.nn.Module) -> Iterator[None]:
    """Hold all parameters inside the block, which all ranks enter together. Writes to them are not detected."""
    begin_owners(model.parameters())
    trainers = {id(each): each for each in map(trainer_of, model.parameters()) if each is not None}
    for trainer in trainers.values():
        if trainer.stage not in (0, 1, 2):  # else the first call inside the block would shard the parameters
            trainer.partition_now()
    with gather_to_read(model.parameters()):
        yield


def full_state(model: torch.nn.Module, keeps: bool) -> dict[str, torch.Tensor]:
    """Return the state_dict() of a sharded model in host memory on ranks that keep it, and an empty one on the others. All
    ranks call it together, and hold one unit more than what they keep."""
    begin_owners(model.parameters())  # before state_dict(), since buffers may be deferred
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return full_tensors(tensors, keeps)


def full_tensors(tensors: Mapping[str, torch.Tensor], keeps: bool) -> dict[str, torch.Tensor]:
    """Return copies of the full values of parameters and buffers, as full_state() does."""
    begin_owners(tensors.values())
    copies: dict[int, torch.Tensor] = {}  # by id of the tensor, which may have several names
    for unit in by_unit(tensors):
        with gathered_unit(unit):
            for tensor in unit.values() if keeps else ():
                if id(tensor) not in copies:
                    copies[id(tensor)] = plain(tensor).to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()} if keeps else {}
