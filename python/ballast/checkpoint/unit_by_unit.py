"""Visit the tensors of a model unit by unit, so that no rank holds more than one unit in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ballast.agreement import Agreement, Ranks
from ballast.checkpoint.inventory import buffers_by_name
from ballast.gathering import gather_to_read
from ballast.torch.calls.hooks import trainer_of
from ballast.torch.parameters.managed_parameter import by_owner, managed, owner_of
from ballast.torch.parameters.placeholder import plain
from ballast.torch.process_groups import rank_in_job
from ballast.torch.tensor_names import named_parameters

Visit = Callable[[str, torch.Tensor], object]


class OneRank:
    """The group of a model that is not trained here: one rank visits it alone."""

    rank, size = 0, 1

    def all_reduce(self, values: Sequence[int]) -> list[int]:
        return list(values)


def group_of(tensors: Iterable[torch.Tensor]) -> Ranks | None:
    """Return the ranks that train the tensors, or None on a rank that has nothing to do."""
    for tensor in tensors:
        owner = owner_of(tensor) or trainer_of(tensor)
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
    for owner, _ in by_owner(each for each in tensors if isinstance(each, torch.nn.Parameter)):
        owner.begin()


@contextmanager
def gathered_unit(unit: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hold one unit's parameters inside the block, which all ranks enter together."""
    with gather_to_read([each for each in unit.values() if isinstance(each, torch.nn.Parameter)]):
        yield


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
        with gathered_unit(unit):
            with agreement.attempt():
                if on_all or group.rank == 0:
                    for name, tensor in unit.items():
                        visit(name, plain(tensor))
        agreement.settle()
