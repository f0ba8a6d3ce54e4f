"""Hold full parameters of a sharded model for reading: all of them, or unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ballast.gathering import gather_to_read
from ballast.wrapper.hooks import trainer_of
from ballast.wrapper.managed_parameter import by_owner, managed


@contextmanager
def gathered_to_read(model: torch.nn.Module) -> Iterator[None]:
    """Hold all parameters inside the block, which all ranks enter together. Writes to them are not detected."""
    begin_owners(model)
    trainers = {id(each): each for each in map(trainer_of, model.parameters()) if each is not None}
    for trainer in trainers.values():
        if trainer.stage not in (0, 1, 2):  # else the first call inside the block would shard the parameters
            trainer.partition_now()
    with gather_to_read(model.parameters()):
        yield


def begin_owners(model: torch.nn.Module) -> None:
    """Make the values of deferred parameters. All ranks do this together."""
    for owner, _ in by_owner(model.parameters()):
        owner.begin()


def units_of(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Group the tensors that are gathered together."""
    units: dict[tuple[int, int | str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = managed(tensor)
        key: tuple[int, int | str] = (0, name) if found is None or found.unit is None else (id(found.owner), found.unit)
        units.setdefault(key, {})[name] = tensor
    return list(units.values())


@contextmanager
def gathered_unit(unit: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hold one unit's parameters inside the block, which all ranks enter together."""
    with gather_to_read([each for each in unit.values() if isinstance(each, torch.nn.Parameter)]):
        yield


def full_state(model: torch.nn.Module, keeps: bool, only_trained: bool = False) -> dict[str, torch.Tensor]:
    """Return the state_dict() of a sharded model in host memory on ranks that keep it, and an empty one on the others. All
    ranks call it together, and hold one unit more than what they keep. `only_trained` leaves out frozen parameters."""
    begin_owners(model)
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    if only_trained:
        tensors = {name: each for name, each in tensors.items() if not is_frozen(each)}
    copies: dict[int, torch.Tensor] = {}  # by id of the tensor, which may have several names
    for unit in units_of(tensors):
        with gathered_unit(unit):
            for tensor in unit.values() if keeps else ():
                if id(tensor) not in copies:
                    copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()} if keeps else {}


def is_frozen(tensor: torch.Tensor) -> bool:
    """Return whether this is a parameter that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
