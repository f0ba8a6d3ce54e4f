"""Load a checkpoint on any number of ranks, at any stage, tier and state format. Everything that can be checked is
checked before anything changes."""

from __future__ import annotations

import difflib
import io
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.custom_state import CustomState
from ballast.checkpoint.manifest import PARAMETER_DTYPES, PARAMETERS, Checkpoint, Place, Reader
from ballast.checkpoint.outer import OuterLoading
from ballast.checkpoint.tensors import (
    LOADING,
    PlainTensor,
    Target,
    TrainedTensor,
    buffers_by_name,
    know_checkpoints,
    moment_name,
    parameter_names,
    parameters_by_name,
    pieces_of,
    read_elements,
    require_all_partitioned,
    warn_of_left,
)
from ballast.checkpoint.torch_file import load_without_code
from ballast.checks import refuse
from ballast.ranks import Agreement, Group, by_first_rank, from_all_ranks
from ballast.torch.memory import tensor_of
from ballast.torch.parameters.deferred_parameters import expect, expect_buffers, require_expected
from ballast.torch.parameters.managed_parameter import is_opaque, plain
from ballast.torch.parameters.units import UnitParameter, names_in_model
from ballast.torch.parts import full_ranges, full_shape, part_of
from ballast.torch.training.partition import Partition
from ballast.torch.training.training import Training
from ballast.torch.updates.rules import is_same, set_options
from ballast.torch.updates.sharded_state import State

log = logging.getLogger("ballast")
Result = TypeVar("Result")


def load_current(place: Place, model: torch.nn.Module, accesses: Sequence[Training]) -> Any:
    """Load the checkpoint that the manifest names, and return this rank's `extra`. All ranks call it together."""

    def run(text: bytes, agreement: Agreement) -> Any:
        return Loading(place, text, model, accesses, agreement).run()

    return use_current(place, accesses[0].ranks.saving_group, run)


def use_current(place: Place, group: Group, use: Callable[[bytes, Agreement], Result]) -> Result:
    """Return what `use` makes of the manifest that rank 0 reads. All ranks call it together.

    A save may replace the checkpoint meanwhile, and remove its files. Then the new one is used.
    """
    read = partial(by_first_rank, group, LOADING, place.read_text)
    for _ in range(manifest.READS):
        text = read()
        agreement = Agreement(group, LOADING)
        try:
            return use(text, agreement)
        except Exception:  # any kind: has_failed is the same on all ranks, and decides what they do next
            if not agreement.has_failed or read() == text:
                raise
    manifest.fail_replaced(place.path)


class Loading:
    """Loads one checkpoint into one model and its optimizers. All ranks do this together."""

    def __init__(
        self,
        place: Place,
        text: bytes,
        model: torch.nn.Module,
        accesses: Sequence[Training],
        agreement: Agreement,
    ):
        self._accesses = accesses
        self._place = place
        self._model = model
        self.agreement = agreement
        self._parameters = parameters_by_name(model, accesses)
        names, buffers = parameter_names(model, accesses), buffers_by_name(model)
        with self.agreement.settled():
            for access in accesses:
                access.require_loadable()
                access.require_changeable()
                require_all_partitioned(access, names)
        group = self.agreement.group
        self.checkpoint = read_together(place, text, self.agreement)
        with self.agreement.settled():
            use_model_names(self.checkpoint, {**self._parameters, **buffers})
            left = leave_out(self.checkpoint, self._parameters, buffers)
            require_compatible(self.checkpoint, accesses, self._parameters, buffers, names)
            require_expected(model, buffers.values())
            self._buffers = [*buffers]
            self.reader, self.names = self.checkpoint.reader, names
            self.tensors = self.checkpoint.tensors
            self._parts = [
                LoadingPart(self, *each) for each in zip(accesses, self.checkpoint.optimizers, self.checkpoint.options)
            ]
            self._extra = read_extra(self.checkpoint, group.rank)
        warn_of_left(left, accesses[0].group.rank)

    def run(self) -> Any:
        for access in self._accesses:
            access.optimizer.zero_grad()
        with self.agreement.settled():  # finds a missing or short file before anything changes
            group = self.agreement.group
            self.checkpoint.require_files(range(group.rank, len(self.checkpoint.files), group.size))
        expect(self._parameters.values())
        expect_buffers(self._model)
        for part in self._parts:
            part.begin()
        buffers = buffers_by_name(self._model)
        with self._accesses[0].changed_together():
            self._parts[0].fill(self._rest(), {name: buffers[name] for name in self._buffers})
            for part in self._parts[1:]:
                part.fill([], {})
        for access in self._accesses:
            access.finish_loading()
        if self.checkpoint.folder:
            know_checkpoints(self._accesses, self._place.path, [self.checkpoint.folder])
        return self._extra

    def _rest(self) -> list[torch.nn.Parameter]:
        """Return the parameters that no optimizer has or shards."""
        done = {number for part in self._parts for number in part.partitioned}
        done |= {id(parameter) for access in self._accesses for _, parameter in access.parameters()}
        return [parameter for parameter in self._parameters.values() if id(parameter) not in done]


def read_together(place: Place, text: bytes, agreement: Agreement) -> Checkpoint:
    """Return the checkpoint of this manifest. One rank reads each index, and tells the others: a file system does not carry N^2
    opens for N ranks. All ranks call it together."""
    rank, size = agreement.group.rank, agreement.group.size
    mine: list[bytes] = []
    with agreement.settled():
        mine = place.read_indexes(text, rank, size)
    shares = from_all_ranks(agreement.group, mine)
    indexes = [shares[number % size][number // size] for number in range(sum(map(len, shares)))]
    found: list[Checkpoint] = []
    with agreement.settled():
        found.append(place.parse(text, indexes, rank))
    return found[0]


def read_extra(checkpoint: Checkpoint, rank: int) -> Any:
    """Return the extra of the rank with the same number; additional ranks start again with that of rank 0. Tensors are
    loaded to the host, because the GPU that they were on may not exist here."""
    if not checkpoint.extras:
        return checkpoint.extra
    extra = checkpoint.extras[rank % checkpoint.ranks]
    content = extra.read()
    return content if extra.raw else load_without_code(io.BytesIO(content), Path(extra.file))


class LoadingPart:
    """Loads one optimizer. The constructor checks everything that can be checked; then all ranks call begin() and fill()
    together."""

    def __init__(self, loading: Loading, access: Training, saved: _core.SavedOptimizer, options: list[dict[str, Any]]):
        self._reader, self._tensors, self._names = loading.reader, loading.tensors, loading.names
        self._agreement = loading.agreement
        self._access = access
        self._saved = saved
        self._custom = CustomState(access, self._tensors, self._names)
        self._custom.require_stored()
        self._outer = OuterLoading(access, self._tensors, self._names, saved.outer_identity)
        self._options = access.options_to_set(options)
        self._warns = bool(loading.checkpoint.converted_from) and access.group.rank == 0
        self._partition: Partition | None = None
        self.partitioned: set[int] = set()  # ids of the parameters in it
        self._frozen_state: State = {}
        self._thawed: State = {}

    def begin(self) -> None:
        """Make a partition that continues after the saved step."""
        if self._warns:
            warn_of_options(self._access.optimizer.param_groups, self._options)
        set_options(self._access.optimizer.param_groups, self._options)
        if self._access.has_custom_step:
            self._frozen_state = self._custom.frozen()
        else:
            self._frozen_state, self._thawed = self._empty_moments()
        made = {id(each): self._tensors[self._name(each)].steps for each in self._saved_parameters()}
        self._partition = self._access.begin_from(made, self._saved.step, self._frozen_state)
        self.partitioned = {id(member.parameter) for member in self._partition.all_members}

    def fill(self, rest: Iterable[torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Read what belongs to the optimizer, and these parameters and buffers."""
        partition = self._partition
        assert partition is not None  # begin() has made it
        self._fill(partition, self._targets(rest, buffers) + self._outer.targets(partition))
        if any(self._access.group.all_reduce([len(self._thawed)])):
            partition.write_moments(moments_by_kind(self._thawed, self._access))
        self._access.skipped = self._saved.skipped

    def _empty_moments(self) -> tuple[State, State]:
        """Allocate the moments of parameters that were frozen when they were saved, or are frozen now. Return those
        that stay with frozen parameters, and those that return to parameters that are trained now."""
        frozen_state: State = {}
        thawed: State = {}
        for parameter in self._saved_parameters():
            name = self._name(parameter)
            entry = self._tensors[name]
            kept = [moment for _, moment in self._access.names_of_moments() if moment_name(name, moment) in self._tensors]
            if not parameter.requires_grad and entry.role == "trained":
                kept = [moment for _, moment in self._access.names_of_moments()]
            if not kept or (parameter.requires_grad and entry.role == "trained"):
                continue
            values = {moment: torch.zeros(parameter.shape, dtype=torch.float32, device="cpu") for moment in kept}
            where = thawed if parameter.requires_grad else frozen_state
            where[id(parameter)] = {"step": torch.tensor(float(entry.steps), device="cpu"), **values}
        return frozen_state, thawed

    def _targets(self, rest: Iterable[torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> list[Target]:
        """Return the targets of the tensors that are not sharded. Each rank fills all of them."""
        moments = {} if self._access.has_custom_step else {**self._frozen_state, **self._thawed}
        targets: list[Target] = []
        for parameter in [*self._saved_parameters(), *rest]:
            name = self._name(parameter)
            entry, own = self._tensors[name], moments.get(id(parameter), {})
            is_sharded, part = id(parameter) in self.partitioned, part_of(parameter)
            if entry.role != "trained":
                targets += [] if is_sharded else [PlainTensor(name, entry, plain(parameter), part=part)]
                kept = {moment_name(name, moment): own[moment] for moment in own if moment != "step"}
                targets += [PlainTensor(moment, self._tensors[moment], each, part=part) for moment, each in kept.items()]
            elif own or not is_sharded:
                by_kind = {kind.name: own[moment] for kind, moment in self._access.names_of_moments() if moment in own}
                targets.append(TrainedTensor(name, entry, parameter, by_kind, is_sharded=is_sharded))
        targets += [PlainTensor(name, self._tensors[name], buffer.data) for name, buffer in buffers.items()]
        return targets

    def _fill(self, partition: Partition, targets: list[Target]) -> None:
        """Read everything in this order: the optimizer's own state, which a run commits with the shards, the shards, and the
        rest."""
        parts = [(partition.member_of(part), part) for part in partition.core.local_shards()]
        parts = [(member, part) for member, part in parts if self._name(member.parameter) in self._tensors]
        own = self._custom.targets(partition)
        wanted = [piece for target in own for piece in target.pieces]
        for member, part in parts:
            first, count = member.parameter_range(part.first, part.count)
            for entry in (self._tensors[self._name(member.parameter)], *self._own_values(member, part).values()):
                wanted += pieces_of(entry, part_of(member.parameter), first, count)
        wanted += [piece for target in targets for piece in target.pieces]
        with self._agreement.settled():
            reader = self._reader(wanted)
        self._fill_targets(own, reader)
        with self._agreement.settled():
            self._custom.install(partition)

        def change(part: _core.StatePart) -> None:
            with self._agreement.attempt():
                member = partition.member_of(part)
                if self._agreement.error is None and self._name(member.parameter) in self._tensors:
                    self._change(part, member, reader)

        partition.change_shards(change, self._saved.step, self._agreement.settle)
        self._fill_targets(targets, reader)

    def _fill_targets(self, targets: list[Target], reader: Reader) -> None:
        with self._agreement.settled():
            for target in targets:
                target.fill(reader)

    def _own_values(self, member: UnitParameter, part: _core.StatePart) -> dict[int, _core.SavedTensor]:
        """Return what the checkpoint has of the values that the library keeps for the optimizer's own step, by their number."""
        return {} if part.frozen else dict(self._custom.stored(self._name(member.parameter)))

    def _change(self, part: _core.StatePart, member: UnitParameter, reader: Reader) -> None:
        name, (first, count) = self._name(member.parameter), member.parameter_range(part.first, part.count)
        ranges, width = full_ranges(part_of(member.parameter), first, count), member.width
        for there, some, at in ranges:
            reader.copy(name, self._tensors[name], there, part.elements(at * width, some * width))
        for number, entry in self._own_values(member, part).items():
            values = read_elements(reader, name, entry, ranges, count)
            tensor_of(part.own(number), torch.float32).copy_(values)

    def _saved_parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's parameters, but for those that a converted checkpoint lacks."""
        return [each for _, each in self._access.parameters() if self._name(each) in self._tensors]

    def _name(self, parameter: torch.nn.Parameter) -> str:
        return self._names[id(parameter)]


def warn_of_options(groups: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
    """Warn of options that are not those of the script any more."""
    changed = [
        f"{key}={new[key]} instead of {group[key]} in param_groups[{number}]"
        for number, (group, new) in enumerate(zip(groups, options))
        for key in new
        if key in group and not is_same(group[key], new[key])
    ]
    if changed:
        log.warning("the optimizer continues with options of the checkpoint: %s", ", ".join(sorted(changed)))


def moments_by_kind(thawed: State, access: Training) -> dict[tuple[int, _core.Moment], torch.Tensor]:
    return {
        (parameter, kind): values[name]
        for parameter, values in thawed.items()
        for kind, name in access.names_of_moments()
        if name in values
    }


def use_model_names(checkpoint: Checkpoint, known: Container[str]) -> None:
    """Rename the tensors of a checkpoint whose names include those of wrappers around the model."""
    checkpoint.names = names_in_model(checkpoint.tensors.keys(), known)
    checkpoint.tensors = {checkpoint.names[name]: tensor for name, tensor in checkpoint.tensors.items()}


def leave_out(checkpoint: Checkpoint, parameters: dict[str, torch.nn.Parameter], buffers: dict[str, torch.Tensor]) -> list[str]:
    """Leave tensors of the model that a converted checkpoint lacks out of the loading, and its further tensors too, as an
    import of the other program's checkpoint does. Return the names of the model's tensors that stay as they are."""
    if not checkpoint.converted_from:
        return []
    saved = checkpoint.tensors
    checkpoint.tensors = {name: entry for name, entry in saved.items() if name in parameters or name in buffers}
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in saved:
            refuse("the checkpoint lacks a parameter that is trained", where=name, needed="all of them, under these names")
    left = [name for name in (*parameters, *buffers) if name not in saved]
    for name in left:
        parameters.pop(name, None)
        buffers.pop(name, None)
    return left


def require_compatible(
    checkpoint: Checkpoint,
    accesses: Sequence[Training],
    parameters: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    names: Mapping[int, str],
) -> None:
    """Raise B1001 where names, shapes, optimizer or parameter groups differ."""
    saved = checkpoint.tensors
    if not checkpoint.converted_from:  # else nothing says which tensors are buffers
        _require_names("parameter", parameters, [name for name, entry in saved.items() if entry.role in PARAMETERS])
        _require_names("buffer", buffers, [name for name, entry in saved.items() if entry.role == "buffer"])
    for name, tensor in {**parameters, **buffers}.items():
        entry = saved[name]
        if entry.shape != list(full_shape(tensor)):
            refuse(
                f"the checkpoint holds a tensor of shape {tuple(entry.shape)}",
                where=name,
                needed=f"{tuple(full_shape(tensor))}, the shape in the model",
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, torch.nn.Parameter) and is_opaque(tensor) and entry.dtype != dtype:
            what = f"cannot load a packed parameter of {dtype} from a checkpoint that has {entry.dtype}"
            refuse(what, where=name, needed="a model that is quantized as the saved one")
        if entry.role == "trained" and dtype not in PARAMETER_DTYPES:
            what = f"cannot load a parameter of {entry.dtype}: it is {tensor.dtype} in this model"
            refuse(what, where=name, needed=f"a model with one of {', '.join(PARAMETER_DTYPES)} there")
    if len(checkpoint.optimizers) != len(accesses):
        refuse(
            f"the checkpoint has {_counted(len(checkpoint.optimizers))}: "
            f"{', '.join(each.optimizer for each in checkpoint.optimizers)}",
            needed=f"{_counted(len(accesses))}, as many as are loaded: load_checkpoint(directory, model, [one, other])",
        )
    for each, access in zip(checkpoint.optimizers, accesses):
        _require_optimizer(each, access)
        if not checkpoint.converted_from:
            saved_groups = [[checkpoint.names[name] for name in group.parameters] for group in each.groups]
            _require_groups(saved_groups, access, names)


def _counted(optimizers: int) -> str:
    return "one optimizer" if optimizers == 1 else f"{optimizers} optimizers"


def _require_names(kind: str, ours: Iterable[str], theirs: Iterable[str]) -> None:
    here, there = set(ours), set(theirs)
    for missing, known, what in (
        (sorted(here - there), there, f"the checkpoint lacks a {kind} of the model"),
        (sorted(there - here), here, f"the checkpoint holds a {kind} that the model lacks"),
    ):
        if missing:
            near = difflib.get_close_matches(missing[0], sorted(known), n=1, cutoff=0.5)
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            refuse(
                what,
                where=missing[0] + rest,
                needed="the model that was saved",
                remedy=f"The nearest name on the other side is {near[0]}." if near else "",
            )


def _require_optimizer(saved: _core.SavedOptimizer, access: Training) -> None:
    moments = {moment.name: name for moment, name in access.names_of_moments()}
    other_custom_step = access.has_custom_step and type(access.optimizer).__name__ != saved.optimizer
    if moments != saved.moments or access.has_custom_step != saved.own_step or other_custom_step:
        refuse(
            f"cannot load a checkpoint of {saved.optimizer} into {type(access.optimizer).__name__}: their states differ",
            needed=f"an optimizer that keeps {_state_kept(saved)}",
        )


def _require_groups(groups_saved: list[list[str]], access: Training, names: Mapping[int, str]) -> None:
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in access.optimizer.param_groups]
    if len(groups) != len(groups_saved):
        refuse(f"the checkpoint has {len(groups_saved)} parameter groups", needed=f"{len(groups)}, the number in the optimizer")
    for number, (ours, theirs) in enumerate(zip(groups, groups_saved)):
        others = sorted(set(ours) ^ set(theirs))
        if others:
            refuse(
                "a parameter is in another group than in the checkpoint",
                where=f"param_groups[{number}]: {others[0]}",
                needed="the same groups",
            )


def _state_kept(saved: _core.SavedOptimizer) -> str:
    if saved.own_step:
        return f"what {saved.optimizer} keeps"
    return " and ".join(saved.moments.values()) or "no moments"
