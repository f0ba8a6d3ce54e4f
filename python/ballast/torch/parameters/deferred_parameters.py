"""Parameters without values. Their values are made or read when training begins: piece by piece, each on the rank that
keeps it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from ballast._torch_compat import swap_tensors_in_place, without_torch_function
from ballast.checks import refuse, refuse_order
from ballast.ranks import Group, from_all_ranks
from ballast.torch.gpu import current_device
from ballast.torch.memory import return_freed_memory, tensor_at
from ballast.torch.parameters.deferred_init import (
    defer_values,
    followed,
    history_of,
    inputs_from_outside,
    read_later,
    stored_of,
    values_of,
)
from ballast.torch.parameters.managed_parameter import (
    CASTS,
    Lifecycle,
    ManagedParameter,
    ParameterOwner,
    ParameterState,
    Placeholder,
    is_on_meta,
    managed,
    nothing_like,
    owner_of,
    plain,
    refuse_access,
    require_no_cast,
)
from ballast.torch.parameters.stored_tensors import Latest, StoredTensor
from ballast.torch.parameters.units import named_buffers, named_parameters, required


class TrainingStarter(Protocol):
    """Begins a training, when a deferred parameter needs it."""

    @property
    def group(self) -> Group: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    def names(self) -> dict[int, str]: ...
    def partition(self) -> object: ...


class DeferredParameters:
    """The owner of parameters without values: until training begins, and between two partitions."""

    def __init__(self, starter: weakref.ref[TrainingStarter]):
        self._starter = starter
        self._taken_over: list[tuple[ManagedParameter, ParameterOwner]] = []  # the parameters with the owners that they had

    def take_over(self, found: ManagedParameter) -> None:
        """Own a parameter without values in place of its owner: of an optimizer that is gone, or that does not train it."""
        assert found.owner is not None
        self._taken_over.append((found, found.owner))
        found.owner = self

    def give_back(self) -> None:
        for found, owner in self._taken_over:
            found.owner = owner
        self._taken_over = []

    def _live(self) -> TrainingStarter:
        starter = self._starter()
        if starter is None or starter.lifecycle is Lifecycle.CLOSED:
            refuse(
                "cannot use a parameter: it has no values yet, and its optimizer is gone or closed",
                needed="ballast.wrap() of another optimizer of the model",
            )
        return starter

    @property
    def group(self) -> Group:
        return self._live().group

    @property
    def lifecycle(self) -> Lifecycle:
        starter = self._starter()
        return Lifecycle.CLOSED if starter is None else starter.lifecycle

    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> NoReturn:
        name = self._live().names()[id(parameters[0])]
        require_no_cast(operation, name, why="its values are made when training begins")
        refuse_access(name, "it has no values yet", "a call of the model, or with ballast.gather(model): ...")

    def begin(self) -> None:
        """Make or read the values, and partition them with all others. All ranks do this together."""
        self._live().partition()

    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> NoReturn:
        """Refuse: after begin() another owner has the parameters, and gathers them."""
        self.using(parameters, "gather")

    def write(self, values: Mapping[torch.nn.Parameter, StoredTensor]) -> None:
        for parameter, stored in values.items():
            begin_with_file(parameter, stored)


def begin_with_file(parameter: torch.nn.Parameter, stored: StoredTensor) -> None:
    """Read the parameter from a file when training begins, whether it is wrapped already or not."""
    values, found = read_later(stored, device_of(parameter)), managed(parameter)
    if found is None:
        defer_values(parameter, values)
    else:
        found.begin_with(values)


class OwnedDeferred(Placeholder):
    """A deferred parameter of a training that has not begun: casts and moves of it are recorded, and its other uses refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = managed(args[0]) if args and type(args[0]) is cls else None
        if found is not None and (recorded := found.initial) is not None:
            name = func.__name__
            if name in CASTS:
                cast = followed(func, (recorded, *args[1:]), kwargs or {})
                return args[0] if cast is recorded else cast
            if name == "_has_compatible_shallow_copy_type" and history_of(args[1]) is not None:
                return True  # Module.to() assigns the cast to .data, and keeps the parameter
            if func == torch.Tensor.data.__set__ and history_of(args[1]) is not None:
                _own(found, args[1])
                return None
        return super().__torch_function__(func, types, args, kwargs)


def _own(found: ManagedParameter, values: torch.Tensor) -> None:
    """Begin with the values of a deferred tensor, in its format and on its device."""
    parameter = found.parameter
    found.begin_with(values)
    with without_torch_function():
        parameter.__class__ = torch.nn.Parameter
        parameter.data = nothing_like(values, device_of(values))
        parameter.__class__ = OwnedDeferred


def suspend(parameter: torch.nn.Parameter, owner: DeferredParameters) -> None:
    """Make a parameter PENDING: it is in no partition any more, and the migration brings its values to the next partition."""
    (managed(parameter) or ManagedParameter(parameter, ParameterState.PENDING)).suspend(owner)


def drop(parameter: torch.nn.Parameter) -> None:
    """Make a PENDING parameter DEFERRED: nothing brings its values any more."""
    found = managed(parameter)
    assert found is not None
    found.begin_with(None)


def drop_pending(model: torch.nn.Module, owner: DeferredParameters) -> None:
    """Drop the pending parameters of a training that ends: nothing brings their values."""
    for parameter in model.parameters():
        if is_pending(parameter) and owner_of(parameter) is owner:
            drop(parameter)


def is_pending(parameter: torch.Tensor) -> bool:
    """Return whether the migration or a checkpoint still brings the parameter's values."""
    found = managed(parameter)
    return found is not None and found.state is ParameterState.PENDING


def expect(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let training begin without the values of these parameters: a checkpoint brings them."""
    for parameter in parameters:
        found = managed(parameter)
        if found is not None and found.lacks_values:
            found.expect()


def replace_buffers(model: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Put what `make` returns into the place of each buffer, unless it is None. A buffer that modules share is made once."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # results by id of the buffer, which the entry keeps alive
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = buffer, make(buffer)
            if (new := made[id(buffer)][1]) is not None:
                module._buffers[name] = new


def expect_buffers(model: torch.nn.Module) -> None:
    """Give memory to buffers without values, which a checkpoint fills. Each rank has all buffers, unsharded."""
    replace_buffers(model, lambda each: torch.empty_like(each, device=device_of(each)) if is_on_meta(each) else None)


def require_expected(model: torch.nn.Module, provided: Iterable[torch.Tensor]) -> None:
    """Refuse a buffer without values that a checkpoint does not bring. It brings those in `provided`."""
    known = {id(buffer) for buffer in provided}
    for name, buffer in named_buffers(model):
        if is_on_meta(buffer) and id(buffer) not in known:
            refuse(
                "cannot load a model with a buffer on the meta device: its values are computed, and not saved",
                where=name,
                needed="the model constructed in ballast.deferred(): then ballast.wrap(optimizer, model) makes them",
            )


def defer(
    model: torch.nn.Module | None, trained: Iterable[torch.nn.Parameter], group: Group, owner: DeferredParameters
) -> None:
    """Make `owner` the owner of the parameters without memory. All ranks do this together. Another optimizer of the model
    keeps those that it owns already, except for the ones that are trained here."""
    trained = [*trained]
    known, own = _all_of(model, trained), {id(parameter) for parameter in trained}
    for parameter in known:
        found = managed(parameter)
        if found is not None and found.is_without_values and found.owner is not None:
            if found.owner.lifecycle in (Lifecycle.CLOSED, Lifecycle.LOST) or id(parameter) in own:
                owner.take_over(found)
    deferred = {id(parameter): parameter for parameter in known if is_on_meta(parameter)}
    if not deferred:
        return
    model = required(model, "wrap parameters on the meta device without a model")
    if group.size > 1:
        tensors = [*deferred.values(), *(each for each in model.buffers() if is_on_meta(each))]
        agree_on_recordings(group, tensors)
        read_indexes(group, tensors)
    replace_buffers(model, lambda each: values_of(each) if history_of(each) is not None else None)  # they are not partitioned
    for parameter in deferred.values():
        _leave_meta_device(parameter, owner)


def defer_again(model: torch.nn.Module | None, trained: Iterable[torch.nn.Parameter], owner: DeferredParameters) -> None:
    """Undo defer(): parameters are on the meta device again, and remember how their values are made."""
    owner.give_back()
    for parameter in _all_of(model, trained):
        found = managed(parameter)
        if found is None or found.owner is not owner:
            continue
        initial = found.initial
        meta = torch.empty_like(parameter, device="meta") if initial is None else initial
        found.release()
        with without_torch_function():
            swap_tensors_in_place(parameter, torch.nn.Parameter(meta.detach(), parameter.requires_grad))
        if initial is not None:
            defer_values(parameter, meta)


def _all_of(model: torch.nn.Module | None, trained: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    model_parameters = [] if model is None else [*model.parameters()]
    return list({id(parameter): parameter for parameter in (*model_parameters, *trained)}.values())


def refuse_to_begin(name: str) -> NoReturn:
    refuse_order(
        "cannot begin to train: a parameter or a buffer is on the meta device, and has no values",
        where=name,
        needed="ballast.load(model, files), ballast.load_checkpoint(), or the model constructed in ballast.deferred()",
    )


def _leave_meta_device(parameter: torch.nn.Parameter, owner: DeferredParameters) -> None:
    """Move a parameter to the device of its future values, with its shape and without memory. It stays the same
    object."""
    meta, device = parameter.data, device_of(parameter)
    parameter.__class__ = torch.nn.Parameter
    swap_tensors_in_place(parameter, torch.nn.Parameter(nothing_like(parameter, device), parameter.requires_grad))
    is_recorded = history_of(meta) is not None
    ManagedParameter(parameter, ParameterState.DEFERRED, initial=meta if is_recorded else None).defer(owner)
    if is_recorded:
        parameter.__class__ = OwnedDeferred


def make_unpartitioned(
    model: torch.nn.Module, partitioned: Iterable[torch.nn.Parameter], keeps: Callable[[torch.Tensor], bool]
) -> None:
    """Make the values of parameters that are not partitioned, in torch's memory, as far as `keeps` accepts them. Refuse
    buffers without values."""
    others = {id(parameter) for parameter in partitioned}
    for name, buffer in named_buffers(model):
        if is_on_meta(buffer):
            refuse_to_begin(name)
    for name, parameter in named_parameters(model):
        found = managed(parameter)
        if id(parameter) in others or found is None or not found.is_without_values or not keeps(parameter):
            continue
        if found.lacks_values:
            refuse_to_begin(name)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        InitialValueReader().read(parameter, 0, full.numel(), full.data_ptr())
        found.release(full.to(parameter.device))


def device_of(deferred: torch.Tensor) -> torch.device:
    """Return the device of the future values: as it was requested, else the current GPU if there is one."""
    if not is_on_meta(deferred):
        return deferred.device
    history = history_of(deferred)
    return current_device() if history is None else history.device


def agree_on_recordings(group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """Let all ranks make the same values as rank 0. All ranks call it together."""
    outside = inputs_from_outside(list(tensors))
    flat = [each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in outside]
    everything = torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *flat])
    bytes_of_ranks = group.all_reduce([len(everything) * (rank == group.rank) for rank in range(group.size)])
    if len(set(bytes_of_ranks)) > 1:
        refuse(
            "cannot make initial values: ranks have constructed the model in different ways",
            where=f"rank {group.rank}",
            needed="the same tensors in the same order, such as torch.manual_seed() with one seed on all ranks",
        )
    group.broadcast(address=everything.data_ptr(), bytes=everything.nbytes, root=0)
    for mine, agreed in zip(outside, everything.split([len(each) for each in flat])):
        mine.copy_(agreed.clone().view(mine.dtype).view(mine.shape))


def read_indexes(group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """Let one rank read each index of the checkpoints in which these tensors are, and tell the others. If ranks have loaded
    different checkpoints, each reads all of its indexes. All ranks call it together."""
    stored = [stored_of(each) for each in tensors if history_of(each) is not None]
    late = [each.source for each in stored if each is not None and each.source is not None and each.is_late]
    sources = {hashlib.sha256(each.manifest).digest(): each for each in late}
    if from_all_ranks(group, [*sources]) == [[*sources]] * group.size:
        for source in sources.values():
            source.read_together(group)


class InitialValueReader:
    """Reads initial values piece by piece. It makes the values of one parameter at a time, and keeps them until
    the next one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._latest = Latest()

    def read(self, parameter: torch.nn.Parameter, first: int, count: int, into: int) -> None:
        """Write elements to this address in host memory."""
        found = managed(parameter)
        initial = None if found is None else found.initial
        if initial is not None and (stored := stored_of(initial)) is not None:
            stored.read(first, count, into)
            return
        if is_pending(parameter):
            tensor_at(into, count, parameter.dtype).zero_()
            return

        def make() -> torch.Tensor:
            return_freed_memory()  # the last one was freed
            return (plain(parameter) if initial is None else values_of(initial)).reshape(-1)

        values = self._latest.get(id(parameter), make)
        tensor_at(into, count, parameter.dtype).copy_(values[first : first + count])
