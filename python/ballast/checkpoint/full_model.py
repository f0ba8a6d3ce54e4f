"""Visit, hold or copy the tensors of a sharded model unit by unit, so that no rank holds more than one unit in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ballast.checkpoint.inventory import buffers_by_name
from ballast.ranks import Agreement, Ranks
from ballast.torch.calls.hooks import receiver_of
from ballast.torch.parameters.managed_parameter import by_owner, managed, owner_of, plain
from ballast.torch.parameters.units import named_parameters
from ballast.torch.process_groups import rank_in_job

Visit = Callable[[str, torch.Tensor], object]


@contextmanager
def gathered_to_read(model: torch.nn.Module) -> Iterator[None]:
    """Hold all parameters inside the block, which all ranks enter together. Writes to them are not detected."""
    begin_owners(model.parameters())
    trainings = {id(each): each for each in map(receiver_of, model.parameters()) if each is not None}
    for training in trainings.values():
        if training.stage not in (0, 1, 2):  # else the first call inside the block would shard the parameters
            training.partition_now()
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
    copies: dict[int, torch.Tensor] = {}  # by id of the tensor, which may have several names

    def copy(name: str, values: torch.Tensor) -> None:
        if keeps and id(tensors[name]) not in copies:
            copies[id(tensors[name])] = values.to("cpu", copy=True)

    visit_units(tensors, copy, "copying a model")
    return {name: copies[id(tensor)] for name, tensor in tensors.items()} if keeps else {}


@contextmanager
def gather_to_read(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hold full parameters as `gather()` does, for reading only: writes are not detected at the end."""
    with ExitStack() as stack:
        for owner, owned in by_owner(_parameters_in(tensors)):
            stack.enter_context(owner.gathered(owned, keeps_writes=False))
        yield


class OneRank:
    """The group of a model that is not trained here: one rank visits it alone."""

    rank, size = 0, 1

    def all_reduce(self, values: Sequence[int]) -> list[int]:
        return list(values)


def group_of(tensors: Iterable[torch.Tensor]) -> Ranks | None:
    """Return the ranks that train the tensors, or None on a rank that has nothing to do."""
    for tensor in tensors:
        owner = owner_of(tensor) or receiver_of(tensor)
        if owner is not None:
            return owner.group
    return OneRank() if rank_in_job() == 0 else None


def by_unit(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Group the tensors that are gathered together."""
    units: dict[tuple[int, int | str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = managed(tensor)
        key: tuple[int, int | str] = (0, name) if found is None or found.unit is None else (id(found.owner), found.unit)
        units.setdefault(key, {})[name] = tensor
    return list(units.values())


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the buffers of a state_dict(), by name. A tensor of several modules has its first name."""
    return {**dict(named_parameters(model)), **buffers_by_name(model)}


def begin_owners(tensors: Iterable[torch.Tensor]) -> None:
    """Make the values of deferred parameters. All ranks do this together."""
    for owner, _ in by_owner(_parameters_in(tensors)):
        owner.begin()


def _parameters_in(tensors: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    return [each for each in tensors if isinstance(each, torch.nn.Parameter)]


def visit_units(tensors: Mapping[str, torch.Tensor], visit: Visit, what: str, *, on_all: bool = True) -> None:
    """Call `visit(name, values)` for each tensor, on all ranks or on the first one. All ranks call it together; an error on
    one of them ends the visit on all, after its unit."""
    begin_owners(tensors.values())
    group = group_of(tensors.values())
    if group is None:  # another rank than the first one, and the model is not trained
        if not on_all:
            return
        group = OneRank()
    agreement = Agreement(group, what)
    for unit in by_unit(tensors):
        with gather_to_read(unit.values()):
            with agreement.attempt():
                if on_all or group.rank == 0:
                    for name, tensor in unit.items():
                        visit(name, plain(tensor))
        agreement.settle()  # after each unit, because a visit of all may take longer than a wait
