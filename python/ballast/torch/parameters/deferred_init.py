"""Deferred tensors: the operations of torch on them are recorded, and run when their values are needed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ballast._torch_compat import (
    COPY_AS,
    TorchDispatchMode,
    arguments_of,
    swap_tensors_in_place,
    tree_leaves,
    tree_map,
    without_modes,
    without_torch_function,
)
from ballast.checks import refuse, refuse_order
from ballast.torch.gpu import default_generator, is_gpu, is_on_gpu
from ballast.torch.memory import return_freed_memory
from ballast.torch.parameters.managed_parameter import is_on_meta
from ballast.torch.parameters.stored_tensors import StoredTensor

# Elements. Smaller tensors are made at once: constructors read such tensors, and deferring them gains nothing.
SMALL = 1024

_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_META = torch.device("meta")


@dataclass(frozen=True)
class DeferredInput:
    """A deferred tensor at the time of an operation.

    It refers to the history of the storage, not to the storage, which owns the history. The garbage collector of torch
    2.9 clears the objects in a cycle with a storage, because it does not know which storages tensors use.
    """

    history: History | None  # None: nothing has recorded how to make the storage
    writes: int  # writes into the storage, before the operation
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        nothing = torch.empty(0, dtype=self.dtype, device=storage.device)
        return nothing.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class GivenInput:
    """The values of a tensor that is an input of an operation."""

    values: torch.Tensor


# The real storage of each history, by its id, and the number of writes that it has had. An operation uses the storage if it was
# recorded after as many writes; else it makes the earlier values again.
BeingMade = Mapping[int, tuple[torch.UntypedStorage, int]]


@dataclass(eq=False)
class Operation:
    """An operation to run later, on real memory."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    device: torch.device
    generator_state: torch.Tensor | None = None

    def run(self, being_made: BeingMade) -> Any:
        def with_values(leaf: Any) -> Any:
            if isinstance(leaf, GivenInput):
                return leaf.values
            return leaf.in_storage(_made(leaf, being_made)) if isinstance(leaf, DeferredInput) else leaf

        args, kwargs = tree_map(with_values, self.args), tree_map(with_values, self.kwargs)
        if self.generator_state is None:
            return self.function(*args, **kwargs)
        generator = generator_of(self.kwargs, self.device)
        now = generator.get_state()
        try:
            generator.set_state(self.generator_state)
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(now)


@dataclass(eq=False)
class History:
    """How to make a storage. The deferred storage owns it, so it is freed with the last tensor that needs it."""

    made_by: Operation
    output: int  # number among the outputs of the operation
    writes: list[Operation] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of the future values."""
        return self.made_by.device


def history_of(tensor: torch.Tensor) -> History | None:
    """Return how to make the tensor; None if nothing has recorded that."""
    with without_torch_function():
        if tensor.layout != torch.strided:
            return None
        found: History | None = getattr(tensor.untyped_storage(), "ballast_history", None)
        return found


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Make the values of a deferred tensor now. The bits are those of a tensor that was made at once."""
    with torch.no_grad(), without_modes():
        deferred = _deferred_input(tensor)
        return deferred.in_storage(_made(deferred, {}))


def read_later(stored: StoredTensor, device: torch.device) -> torch.Tensor:
    """Return a deferred tensor that is read from files onto this device."""
    with without_modes():
        made = torch.empty(stored.shape, dtype=stored.dtype, device=_META)
        made.untyped_storage().ballast_history = History(Operation(_read, (stored, device), {}, device), 0)
        return made


def _read(stored: StoredTensor, device: torch.device) -> torch.Tensor:
    return stored.read_all().to(device)


def stored_of(tensor: torch.Tensor) -> StoredTensor | None:
    """Return the tensor of files that a deferred tensor is, cast to its format; None if other operations make its values."""
    return _stored(_deferred_input(tensor))


def _stored(deferred: DeferredInput) -> StoredTensor | None:
    if deferred.history is None or deferred.writes > 0:
        return None
    made_by = deferred.history.made_by
    found: StoredTensor | None = None
    if made_by.function is _read:
        found = made_by.args[0]
    elif made_by.function is COPY_AS and isinstance(made_by.args[0], DeferredInput):
        before = _stored(made_by.args[0])
        found = None if before is None else before.in_format(made_by.kwargs.get("dtype") or before.dtype)
    if found is None or (found.dtype, found.shape, 0) != (deferred.dtype, deferred.size, deferred.offset):
        return None
    in_order = torch.empty(deferred.size, device=_META).stride()
    return found if deferred.stride == in_order else None


def generator_of(kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    given: torch.Generator | None = kwargs.get("generator")
    return default_generator(device) if given is None else given


def inputs_from_outside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs of recorded operations: states of generators, and tensors with values."""
    found: list[torch.Tensor] = []
    visited: set[int] = set()

    def visit(history: History | None) -> None:
        if history is None or id(history) in visited:
            return
        visited.add(id(history))
        for operation in (history.made_by, *history.writes):
            if id(operation) in visited:
                continue
            visited.add(id(operation))
            if operation.generator_state is not None:
                found.append(operation.generator_state)
            for leaf in tree_leaves((operation.args, operation.kwargs)):
                if isinstance(leaf, GivenInput):
                    found.append(leaf.values)
                elif isinstance(leaf, DeferredInput):
                    visit(leaf.history)

    for tensor in tensors:
        visit(history_of(tensor))
    return found


class Recorder(TorchDispatchMode):
    """While it is active, torch makes large tensors without memory. Random numbers are still drawn, and dropped, so
    that generators continue as if nothing were deferred. With `computes`, it defers no operations on tensors with values."""

    def __init__(self, *, computes: bool = False):
        super().__init__()
        self._computes = computes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors_in((args, kwargs))
        histories = [history for history in map(history_of, given) if history is not None]
        if not histories:
            return _made_now_or_later(func, args, kwargs) if not given else func(*args, **kwargs)
        written = [history_of(tensor) for tensor in _written(func, args, kwargs)]
        is_computed = self._computes and not written and not all(map(is_on_meta, given))
        if is_computed or None in written or _NEEDS_VALUES & set(func.tags):
            return func(*tree_map(_real, tuple(args)), **tree_map(_real, kwargs))
        return _record(func, args, kwargs, kwargs.get("device") or histories[0].device)


class FutureDevice(TorchFunctionMode):
    """Lets deferred tensors report their future device: constructors do not initialize tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DEVICE_PROPERTIES:
            history = history_of(args[0])
            if history is not None:
                return _DEVICE_PROPERTIES[func](history.device)
        _refuse_to_set_gradient(func, args)
        return func(*args, **(kwargs or {}))


_state = threading.local()


@contextmanager
def recording(*, computes: bool = False) -> Iterator[None]:
    """Record operations on deferred tensors inside the block. One inside of another changes nothing."""
    if getattr(_state, "is_recording", False):
        yield
        return
    _state.is_recording = True
    try:
        with Recorder(computes=computes), FutureDevice():
            yield
    finally:
        _state.is_recording = False


def followed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with deferred tensors, and continue their recording: what it makes of them is deferred, unless
    it computes with tensors that have values."""
    if func in _DIFFERENTIATE:
        _refuse_gradients()
    _refuse_to_set_gradient(func, args)
    if func == _IS_META and not getattr(_state, "is_recording", False):
        return is_on_meta(args[0])  # callers ask whether there is memory
    with without_torch_function(), recording(computes=True):
        result = func(*args, **kwargs)
    for each in _tensors_in(result):
        if history_of(each) is not None:
            _follow(each)
        elif each.grad_fn is not None:
            _refuse_gradients()
    return result


def _refuse_to_set_gradient(func: Any, args: Sequence[Any]) -> None:
    """Refuse a gradient of a tensor without memory: wrap() gives it other memory, and the gradient would be lost."""
    if func == torch.Tensor.grad.__set__ and args[1] is not None and history_of(args[0]) is not None:
        _refuse_gradients("set", where=_described(args[0]))


def _refuse_gradients(verb: str = "compute", where: str = "") -> None:
    refuse_order(
        f"cannot {verb} gradients: the model is deferred, and its training has not begun",
        where=where,
        needed="ballast.wrap(optimizer, model) before that; or torch.no_grad() for a call without gradients",
    )


_IS_META = torch.Tensor.is_meta.__get__
_DIFFERENTIATE = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _follow_function(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return followed(func, args, kwargs or {})


def _described(tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
    kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else "Tensor"
    return f"{kind} of {tuple(tensor.shape)}, {tensor.dtype}, made when training begins"


class DeferredTensor(torch.Tensor):
    """A deferred tensor after the block of `ballast.deferred()`. A change of its class makes a tensor one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return values_of(self).__reduce_ex__(protocol)

    __repr__, __format__ = _described, lambda self, spec: format(repr(self), spec)
    __torch_function__: Any = classmethod(_follow_function)


class DeferredParameter(torch.nn.Parameter):
    """A deferred parameter after the block of `ballast.deferred()`, until it is wrapped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        values = self.detach().clone()
        values.__class__ = torch.Tensor
        memo[id(self)] = copied = torch.nn.Parameter(values, self.requires_grad)
        _follow(copied)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(values_of(self), self.requires_grad).__reduce_ex__(protocol)

    __repr__, __format__ = _described, lambda self, spec: format(repr(self), spec)
    __torch_function__: Any = classmethod(_follow_function)


_FOLLOWING: dict[type[torch.Tensor], type[torch.Tensor]] = {
    torch.Tensor: DeferredTensor,
    torch.nn.Parameter: DeferredParameter,
}


def defer_values(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter have the values of a deferred tensor."""
    with without_torch_function():
        if is_on_meta(parameter):
            parameter.data = values
        else:
            swap_tensors_in_place(parameter, torch.nn.Parameter(values, parameter.requires_grad))
    _follow(parameter)


def _follow(tensor: torch.Tensor) -> None:
    if type(tensor) in _FOLLOWING:
        tensor.__class__ = _FOLLOWING[type(tensor)]


def follow_all() -> None:
    """Continue the recording of all deferred tensors after a block. Python's collector knows them, wherever they are: copies of
    modules are registered nowhere."""
    for each in gc.get_objects():
        if type(each) in _FOLLOWING and is_on_meta(each) and history_of(each) is not None:
            _follow(each)


_DEVICE_PROPERTIES: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    _IS_META: lambda device: False,
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",
    is_on_gpu: is_gpu,
}


def _made_now_or_later(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is None:
        return func(*args, **kwargs)
    if device == _META:  # torch requests it to write a number to a deferred tensor
        cpu = torch.device("cpu")
        return _record(func, args, {**kwargs, "device": cpu}, cpu)
    shape = func(*args, **_on_meta(kwargs))
    if shape.numel() <= SMALL:
        return func(*args, **kwargs)
    return _record(func, args, kwargs, device)


def _record(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    written = list(_written(func, args, kwargs))
    operation = Operation(func, tree_map(_remembered, tuple(args)), tree_map(_remembered, kwargs), device)
    if torch.Tag.nondeterministic_seeded in func.tags:
        operation.generator_state = generator_of(kwargs, device).get_state()
        _draw(operation, written)
    result = func(*tree_map(_without_values, tuple(args)), **tree_map(_without_values, _on_meta(kwargs)))
    for tensor in written:
        tensor.untyped_storage().ballast_history.writes.append(operation)
    for number, output in enumerate(_tensors_in(result)):
        if history_of(output) is None:
            output.untyped_storage().ballast_history = History(operation, number)
    return result


def _draw(operation: Operation, written: Sequence[torch.Tensor]) -> None:
    """Draw random numbers into memory that is dropped at once."""
    into = {}
    for tensor in written:
        deferred = _deferred_input(tensor)
        memory = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=operation.device)
        into[id(deferred.history)] = (memory.untyped_storage(), deferred.writes)
        del memory
    state, operation.generator_state = operation.generator_state, None  # the generator advances
    operation.run(into)
    operation.generator_state = state
    into.clear()
    return_freed_memory()


def _made(deferred: DeferredInput, being_made: BeingMade) -> torch.UntypedStorage:
    """Make the storage as it was at the time of the operation."""
    history = deferred.history
    if history is None:
        refuse("cannot make the values of a tensor on the meta device: nothing has recorded how", needed="ballast.deferred()")
    made, writes = being_made.get(id(history), (None, 0))
    if made is not None and writes == deferred.writes:
        return made
    made = _tensors_in(history.made_by.run(being_made))[history.output].untyped_storage()
    for number, write in enumerate(history.writes[: deferred.writes]):
        write.run({**being_made, id(history): (made, number)})
    return made


def _deferred_input(tensor: torch.Tensor) -> DeferredInput:
    history = history_of(tensor)
    writes = 0 if history is None else len(history.writes)
    with without_torch_function():
        shape, stride = tuple(tensor.shape), tensor.stride()
        return DeferredInput(history, writes, tensor.dtype, shape, stride, tensor.storage_offset())


def _tensors_in(what: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(what) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for number, argument in enumerate(arguments_of(func)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors_in(value)


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _META} if kwargs.get("device") is not None else kwargs


def _remembered(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _deferred_input(leaf) if is_on_meta(leaf) else GivenInput(leaf.detach().clone())


def _without_values(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, torch.Tensor) and not is_on_meta(leaf) else leaf


def _real(leaf: Any) -> Any:
    return values_of(leaf) if isinstance(leaf, torch.Tensor) and history_of(leaf) is not None else leaf
