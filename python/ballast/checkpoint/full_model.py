"""Visit, hold or copy the tensors of a sharded model unit by unit, or write them to safetensors files, so that no rank holds
more than one unit in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.checkpoint.hub_names import HubNames, MergedAdapters
from ballast.checkpoint.manifest import slices
from ballast.checkpoint.tensors import tensors_of
from ballast.checks import refuse
from ballast.ranks import Agreement, Group, connect
from ballast.safetensors_format import DTYPES, SUFFIX
from ballast.torch.calls.hooks import receiver_of
from ballast.torch.parameters.managed_parameter import by_owner, managed, owner_of, plain, slice_on_host
from ballast.torch.parameters.units import unwrapped
from ballast.torch.parts import full_shape, part_of
from ballast.torch.process_groups import rank_in_job

Item = tuple[str, str, list[int], int]  # name, format, shape and bytes of a tensor
Visit = Callable[[str, torch.Tensor], object]
EXPORTING = "exporting a model"
COPIED = 4 << 20  # elements that are copied to the host at once


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


def fits_in_full(model: torch.nn.Module) -> bool:
    """Return whether each rank has memory for all parameters at once. All ranks call it together."""
    training = next((each for each in map(receiver_of, model.parameters()) if each is not None), None)
    if training is None or training.stage in (0, 1, 2):
        return True
    with without_torch_function():
        needed = sum(parameter.nbytes for parameter in model.parameters())
    return training.has_room(needed)


def full_state(model: torch.nn.Module, keeps: bool) -> dict[str, torch.Tensor]:
    """Return the state_dict() of a sharded model in host memory on ranks that keep it, and an empty one on the others. All
    ranks call it together, and hold one unit more than what they keep."""
    begin_owners(model.parameters())  # this comes before state_dict(), since buffers may be deferred
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return full_tensors(tensors, keeps)


def full_tensors(tensors: Mapping[str, torch.Tensor], keeps: bool) -> dict[str, torch.Tensor]:
    """Return copies of the full values of parameters and buffers, as full_state() does."""
    copies: dict[int, torch.Tensor] = {}  # keys: the ids of tensors, which may have several names

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


def group_of(tensors: Iterable[torch.Tensor]) -> Group | None:
    """Return the ranks that train some of the tensors, or hold them together. A model that is not trained has rank 0 alone:
    other ranks get None."""
    tensors = list(tensors)
    for training in map(receiver_of, tensors):
        if training is not None:
            return training.ranks.saving_group
    owner = next((each for each in map(owner_of, tensors) if each is not None), None)
    if owner is not None:
        return owner.group
    return connect(rank=0, size=1) if rank_in_job() == 0 else None


def grouped_by_unit(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Group the tensors that are gathered together."""
    units: dict[tuple[int, int | str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = managed(tensor)
        key: tuple[int, int | str] = (0, name) if found is None or found.unit is None else (id(found.owner), found.unit)
        units.setdefault(key, {})[name] = tensor
    return list(units.values())


def begin_owners(tensors: Iterable[torch.Tensor]) -> None:
    """Make the values of deferred parameters. All ranks do this together."""
    for owner, _ in by_owner(_parameters_in(tensors)):
        owner.begin()


def _parameters_in(tensors: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    return [each for each in tensors if isinstance(each, torch.nn.Parameter)]


def visit_units(
    tensors: Mapping[str, torch.Tensor],
    visit: Visit,
    what: str,
    *,
    on_all: bool = True,
    also: Mapping[int, Sequence[torch.Tensor]] | None = None,
    group: Group | None = None,
) -> None:
    """Call `visit(name, values)` for each tensor, on all ranks or on the first one, and gather other tensors with those that
    have some in `also`, by id. All ranks of the group, or else those that train the tensors, call it together; an error on one
    of them ends the visit on all, after its unit."""
    begin_owners(tensors.values())
    group = group or group_of(tensors.values())
    if group is None:  # another rank than the first one, and the model is not trained
        if not on_all:
            return
        group = connect(rank=0, size=1)
    agreement = Agreement(group, what)
    for unit in grouped_by_unit(tensors):
        others = [each for tensor in unit.values() for each in (also or {}).get(id(tensor), ())]
        with gather_to_read([*unit.values(), *others]):
            for name, tensor in unit.items():
                values, part = plain(tensor), part_of(tensor)
                values = values if part is None else part.full(values)
                with agreement.attempt():
                    if agreement.error is None and (on_all or group.rank == 0):
                        visit(name, values)
        agreement.settle()  # ranks settle after each unit, because a visit of all may take longer than a wait


def export_model(model: torch.nn.Module, path: Path, most_bytes: int | None, *, merges: bool = False) -> None:
    """Write a model, with merged adapters or as it is. All ranks that train it call this together, and the first one writes."""
    if path.suffix != SUFFIX:
        refuse(f"cannot export a model to {path.name}: it is another format", needed=f"a name that ends with {SUFFIX}")
    merged = MergedAdapters(model) if merges else None
    tensors, inner = (tensors_of(model), unwrapped(model)) if merged is None else (merged.tensors, merged.model)
    begin_owners(model.parameters())
    names, described = HubNames(inner, tensors), HubNames(inner, tensors)
    items = [
        item_of(name, like.dtype, like.shape)
        for own, tensor in tensors.items()
        for name, like in described.take(own, torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta"))
    ]
    group = group_of(model.parameters())  # where PEFT trains adapters alone, their base has no ranks of its own
    if group is None:
        return
    agreement = Agreement(group, EXPORTING)
    with ExitStack() as at_the_end:
        with agreement.settled():
            if group.rank == 0:
                writer = at_the_end.enter_context(safetensors_files(path.parent, path.stem, items, most_bytes))

        def write(own: str, tensor: torch.Tensor) -> None:
            for name, values in names.take(own, tensor if merged is None else merged.value(own, tensor)):
                for first, count in slices(values.numel(), COPIED):
                    write_values(writer, name, first, slice_on_host(values, first, count))

        also = None if merged is None else merged.adapters
        visit_units(tensors, write, EXPORTING, on_all=False, also=also, group=group)
        with agreement.settled():
            if group.rank == 0:
                writer.finish()


@contextmanager
def safetensors_files(
    folder: Path, stem: str, items: Sequence[Item], most_bytes: int | None
) -> Iterator[_core.SafetensorsWriter]:
    """Create the files of a model. They are removed at the end of the block unless they are finished."""
    folder.mkdir(parents=True, exist_ok=True)
    _core.require_space(str(folder), sum(size for _, _, _, size in items))
    writer = _core.SafetensorsWriter(str(folder), stem, items, most_bytes)
    try:
        yield writer
    finally:
        writer.discard()


def write_values(writer: _core.SafetensorsWriter, name: str, first: int, values: torch.Tensor) -> None:
    """Write elements of a tensor, which are on the host."""
    writer.write(name, first * values.element_size(), values.data_ptr(), values.nbytes)


def item_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Item:
    known = {ours: theirs for theirs, ours in DTYPES.items()}
    word = str(dtype).removeprefix("torch.")
    if word not in known:
        refuse(f"safetensors files cannot hold {dtype}", where=name, needed=f"one of {', '.join(known)}")
    return name, known[word], list(shape), torch.Size(shape).numel() * dtype.itemsize
