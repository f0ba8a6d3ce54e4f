"""A parameter whose values Ballast keeps: its states, its owner, and the effect of each transition on torch's parameter.

DEFERRED ── materialise ──> SHARDED <── gather, reshard ──> GATHERED        (stage 3)
                               │ ▲
                       offload │ │ reload       FULL (stages 0 to 2)        RELEASED at the end
                               ▼ │
                            OFFLOADED
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from functools import cache
from inspect import signature
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from ballast._torch_compat import is_alias, make_wrapper_tensor, without_any_torch_function, without_torch_function
from ballast.checks import fail, refuse, refuse_order, refuse_unsupported
from ballast.ranks import Group
from ballast.torch.gpu import GPU
from ballast.torch.memory import DTYPES
from ballast.torch.parameters.stored_tensors import StoredTensor

Key = TypeVar("Key")


class ParameterState(Enum):
    """Where the values of a parameter are."""

    following: tuple[ParameterState, ...]  # TRANSITIONS sets it; each call of a module needs it, so this look-up uses no hash

    DEFERRED = "deferred"  # nowhere yet: they are made, or read from files, when training begins
    PENDING = "pending"  # not here: a checkpoint, or the migration to the next partition, brings them
    SHARDED = "sharded"  # each rank keeps its shard (stage 3)
    GATHERED = "gathered"  # torch sees all of them, in memory that is acquired for a while (stage 3)
    FULL = "full"  # torch sees all of them, in memory that stays (stages 0 to 2)
    OFFLOADED = "offloaded"  # off the device, until reload()
    RELEASED = "released"  # torch has them in memory of its own: Ballast no longer manages the parameter
    LOST = "lost"  # the training has ended without all of its ranks, and the values with it


TRANSITIONS: Mapping[ParameterState, frozenset[ParameterState]] = {
    ParameterState[before]: frozenset(ParameterState[after] for after in following.split())
    for before, following in {
        "DEFERRED": "PENDING SHARDED FULL RELEASED",
        "PENDING": "DEFERRED SHARDED FULL RELEASED",  # DEFERRED: other values are read instead, or nothing brings them any more
        "SHARDED": "GATHERED OFFLOADED PENDING RELEASED LOST",  # PENDING: the next partition gets the shard
        "GATHERED": "SHARDED LOST",  # LOST: an optimizer may be deleted inside a gather() block
        "FULL": "OFFLOADED RELEASED",
        "OFFLOADED": "SHARDED FULL LOST",
        "RELEASED": "",
        "LOST": "PENDING",  # the migration still has the values if no partition could be made, or a checkpoint brings others
    }.items()
}


for _state, _following in TRANSITIONS.items():
    _state.following = tuple(_following)


def require_transition(before: ParameterState, after: ParameterState) -> None:
    """Raise B1999 unless this transition exists. Staying in a state is always possible."""
    if after is before or after in before.following:
        return
    possible = ", ".join(state.name for state in ParameterState if state in TRANSITIONS[before])
    fail(
        "internal",
        f"cannot change a parameter from {before.name} to {after.name}: there is no such transition",
        needed=f"{before.name} to {possible}" if possible else f"nothing: {before.name} is the end",
    )


# Each call of a module needs these two, of each of its parameters, so nothing looks them up or calls a function for them.
_SHARDED, _GATHERED = ParameterState.SHARDED, ParameterState.GATHERED

_PLAIN = torch.nn.Parameter  # the class of which torch's functions see the memory, and ask no class of Ballast


class Lifecycle(Enum):
    """Where a training is in its life. A partition has OPEN, CLOSED and LOST only."""

    OPEN = "open"
    OFFLOADED = "offloaded"  # off its device, until reload()
    HALF_LOADED = "half loaded"  # it has a part of a checkpoint
    CLOSED = "closed"  # it has ended: torch has the values, or the next partition has them
    LOST = "lost"  # it has ended without all of its ranks, and the values are lost


class ParameterOwner(Protocol):
    """Keeps values that torch does not have. It does not know the layers above it: its constructor gets callbacks into
    them."""

    @property
    def group(self) -> Group:
        """The ranks that keep the values together."""

    @property
    def lifecycle(self) -> Lifecycle:
        """That of the training. When it has ended, another one may take the parameters."""

    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> AbstractContextManager[None]:
        """Bring these parameters' values for one operation of torch, or refuse. With `again`, it uses views of them that a
        call of a module has made. With `copied`, its result is a view of them, which may be used later."""

    def begin(self) -> None:
        """Materialise the deferred parameters. All ranks do this together."""

    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> AbstractContextManager[None]:
        """Hold these parameters full inside the block. All ranks do this together."""

    def write(self, values: Mapping[torch.nn.Parameter, StoredTensor]) -> None:
        """Take values from files. All ranks do this together."""


class ManagedParameter:
    """The attribute that Ballast sets on a torch parameter.

    A FULL or RELEASED parameter does not have it: torch uses such a parameter as any other, and its pickle has no trace
    of Ballast. The memory of the parameters keeps this object meanwhile.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        state: ParameterState,
        *,
        owner: ParameterOwner | None = None,
        initial: torch.Tensor | None = None,
    ):
        self._parameter = weakref.ref(parameter)  # the parameter owns this object
        self.kind = kind_of(parameter)
        self.is_opaque = is_opaque(parameter)
        self._gathered_kind = gathered_opaque(self.kind) if self.is_opaque else self.kind  # type: ignore[arg-type]
        self._state = state
        self.owner = owner  # none: the model is not wrapped yet, or torch has the values
        self.initial = initial  # while it is DEFERRED, the tensor on the meta device whose recorded operations make its values
        self.unit: int | None = None  # the unit while it is SHARDED or GATHERED: parameters of one unit are gathered together
        self._version = 0  # torch's count of writes, when the parameter was SHARDED last
        if state is not ParameterState.FULL:
            setattr(parameter, ATTRIBUTE, self)

    def __reduce__(self) -> NoReturn:
        refuse_order(
            "cannot pickle a parameter: its values are partitioned over ranks",
            needed="model.state_dict(), inside of `with ballast.gather(model)`; or ballast.export(), or ballast.save()",
        )

    @property
    def state(self) -> ParameterState:
        return self._state

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter = self._parameter()
        assert parameter is not None  # it owns this
        return parameter

    @property
    def is_collected(self) -> bool:
        """Whether Python's collector is deleting the parameter. If a model and its optimizer refer to each other, it deletes
        them together, and the optimizer closes after the weak references to the parameters have ended."""
        return self._parameter() is None

    @property
    def is_without_values(self) -> bool:
        """Whether a training owns the parameter, and has no values of it yet."""
        return self.owner is not None and self._state in (ParameterState.DEFERRED, ParameterState.PENDING)

    @property
    def lacks_values(self) -> bool:
        """Whether training cannot begin with it: nothing brings its values, and there are none to begin with."""
        return self.owner is not None and self._state is ParameterState.DEFERRED and self.initial is None

    # --- Before training ---

    def defer(self, owner: ParameterOwner) -> None:
        """Let a training own a parameter that has no memory."""
        self._enter(ParameterState.DEFERRED)
        self.owner = owner
        self.parameter.__class__ = Placeholder

    def begin_with(self, initial: torch.Tensor | None) -> None:
        """Begin with these values, instead of others. There are none yet if it is None."""
        self._enter(ParameterState.DEFERRED)
        self.initial = initial

    def expect(self) -> None:
        """Begin without values: a checkpoint brings them."""
        self._enter(ParameterState.PENDING)

    # --- Between two partitions ---

    def suspend(self, owner: ParameterOwner) -> None:
        """Leave a partition: the migration to the next one has the values, and brings them."""
        self._enter(ParameterState.PENDING)
        self._take_from_torch(owner, nothing_like(self.parameter, self.parameter.device))

    # --- In training ---

    def fill(self, values: torch.Tensor) -> None:
        """Become FULL: torch sees the values in this memory from now on."""
        self._enter(ParameterState.FULL)
        self._return_to_torch(values)

    def shard(self, owner: ParameterOwner, unit: int, nothing: torch.Tensor) -> None:
        """Become SHARDED: each rank keeps its shard. `nothing` has the parameter's shape."""
        self._enter(ParameterState.SHARDED)
        self.unit = unit
        self._take_from_torch(owner, nothing)

    def gather(self, values: torch.Tensor, *, is_copy: bool = False) -> None:
        """Become GATHERED: torch sees all values until the parameter is resharded. The memory of a copy has no other values
        later, so views of it are as those of any parameter."""
        if self._state is not _SHARDED:
            require_transition(self._state, _GATHERED)
        self._state = _GATHERED
        parameter = self._parameter()
        assert parameter is not None  # it owns this
        parameter.__class__ = _PLAIN
        parameter.data = values
        if self.is_opaque:
            parameter.__class__ = self.kind if is_copy else self._gathered_kind

    def reshard(self, nothing: torch.Tensor, address: int) -> torch.Tensor | None:
        """Become SHARDED again. Return the values if torch has counted a write to them, or has them at another address than
        this one, of the memory that they were gathered into. Do nothing if it is SHARDED: a call that was interrupted is
        made again."""
        if self._state is not _GATHERED:
            require_transition(self._state, _SHARDED)
            if self._state is _SHARDED:
                return None
        parameter, written = self._parameter(), None
        if parameter is not None:  # else Python's collector is deleting it, see is_collected
            parameter.__class__ = _PLAIN
            version, here = parameter._version, parameter.data_ptr()
            if version != self._version or (here != address and here != nothing.data_ptr()):
                self._version, written = version, parameter.data
            parameter.data = nothing
            parameter.__class__ = Placeholder
        self._state = _SHARDED  # last, because an interrupt may arrive before
        return written

    def take_write(self) -> bool:
        """Return whether torch has counted a write since this was asked, or the parameter was resharded."""
        parameter = self._parameter()
        version = self._version if parameter is None else parameter._version
        before, self._version = self._version, version
        return version != before

    def offload(self, owner: ParameterOwner) -> None:
        """Become OFFLOADED: the values are off the device, and this owner refuses their use."""
        is_full = self._state is ParameterState.FULL
        self._enter(ParameterState.OFFLOADED)
        if is_full:  # a sharded one has no memory of torch now
            self._take_from_torch(owner, nothing_like(self.parameter, self.parameter.device))

    def reload(self) -> None:
        """Become SHARDED after OFFLOADED, in the same memory."""
        self._enter(ParameterState.SHARDED)

    # --- The end ---

    def release(self, values: torch.Tensor | None = None) -> None:
        """Become RELEASED: torch has these values in memory of its own, or without `values` those that it sees."""
        self._enter(ParameterState.RELEASED)
        if not self.is_collected:
            self._return_to_torch(values)

    def lose(self) -> None:
        """Become LOST: the training ends without all of its ranks. The owner refuses each use of the values."""
        self._enter(ParameterState.LOST)

    def _enter(self, state: ParameterState) -> None:
        require_transition(self._state, state)
        self._state = state

    def _take_from_torch(self, owner: ParameterOwner, nothing: torch.Tensor) -> None:
        parameter, self.owner, self.initial = self.parameter, owner, None
        parameter.__class__ = _PLAIN
        self._version = parameter._version
        parameter.data = nothing
        setattr(parameter, ATTRIBUTE, self)
        parameter.__class__ = Placeholder

    def _return_to_torch(self, values: torch.Tensor | None) -> None:
        parameter, self.owner, self.initial = self.parameter, None, None
        parameter.__class__ = self.kind
        vars(parameter).pop(ATTRIBUTE, None)
        if values is not None:
            parameter.data = values


def managed(parameter: Any) -> ManagedParameter | None:
    """Return the ManagedParameter of a parameter; None if torch has the values in memory that stays."""
    found: ManagedParameter | None = getattr(parameter, ATTRIBUTE, None)
    return found


def owner_of(parameter: Any) -> ParameterOwner | None:
    """Return the owner of the values; None if torch has them, or if the model is not wrapped yet."""
    found = managed(parameter)
    return None if found is None else found.owner


def by_owner(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[ParameterOwner, list[torch.nn.Parameter]]]:
    return grouped(parameters, owner_of)


def grouped(
    parameters: Iterable[torch.nn.Parameter], key: Callable[[torch.nn.Parameter], Key | None]
) -> list[tuple[Key, list[torch.nn.Parameter]]]:
    """Group the parameters that have a key by this object."""
    found: dict[int, tuple[Key, list[torch.nn.Parameter]]] = {}
    for parameter in parameters:
        if (its_key := key(parameter)) is not None:
            found.setdefault(id(its_key), (its_key, []))[1].append(parameter)
    return list(found.values())


def is_without_values(parameter: torch.Tensor) -> bool:
    found = managed(parameter)
    return found is not None and found.is_without_values


# --- The classes that a parameter has while its values are elsewhere ---
# A use of the parameter, or of a view of an opaque one, asks the owner for the values. A cast is refused: the optimizer keeps
# values in the format that they had.

CASTS = {"to", "type", "half", "bfloat16", "float", "double", "cpu", GPU}  # methods of tensors


def refuse_cast(what: str, name: str, *, code: str = "unsupported", to_look: str = "", available: str = "") -> NoReturn:
    """Raise the error. `to_look` says how to get a copy in another format."""
    needed = "a model that is cast and moved before ballast.wrap(), or before its first step"
    fail(
        code,
        what,
        where=f"parameter {name}",
        needed=f"{needed}; to look at a copy: {to_look}" if to_look else needed,
        available=available,
        remedy="To cast a model that was trained: optimizer.close(), cast the model, and wrap a new optimizer.",
    )


OFF_DEVICE = "its training is off the device"


def refuse_access(name: str, why: str, needed: str) -> NoReturn:
    """Refuse the use of a parameter whose values are elsewhere."""
    refuse_order(f"cannot use a parameter: {why}", where=f"parameter {name}", needed=needed)


def refuse_lost(name: str, why: str) -> NoReturn:
    """Refuse the use of a parameter whose values ended with its training."""
    needed = (
        "optimizer.close() on all ranks, before it is deleted; after close(gather=False), a model that is constructed again"
    )
    refuse_access(name, f"its optimizer is gone, {why}", needed)


def require_no_cast(use: str, name: str, *, why: str) -> None:
    """Refuse the function `use` of a parameter whose values are elsewhere, if it is a cast or a move."""
    if use in CASTS:
        what = f"cannot cast or move a parameter with {use}(): {why}"
        refuse_cast(what, name, code="out_of_order", to_look="with ballast.gather(model): ...")


def require_same_kind(name: str, *, kept: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse a parameter that cannot be copied back."""
    if (kept.dtype, kept.device) != (found.dtype, found.device):
        what = f"cannot continue: the model was cast or moved from {kept.dtype} on {kept.device} after training began"
        refuse_cast(what, name, available=f"{found.dtype} on {found.device}")
    if kept.shape != found.shape:
        refuse_unsupported(
            "cannot continue: a parameter changed its shape after training began",
            where=f"parameter {name}",
            needed=f"shape {tuple(kept.shape)}, or a new parameter in the model and in param_groups",
            available=f"shape {tuple(found.shape)}",
        )


# Functions of a parameter that do not need its values.
_HARMLESS = {
    *("__get__", "__set__", "__hash__", "__len__", "size", "dim", "numel", "nelement", "stride", "element_size"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "_has_compatible_shallow_copy_type"),
    *("register_hook", "register_post_accumulate_grad_hook"),
}

# Functions that need the graph, and no values of the parameters in it.
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)

# Properties that are the values. Those are needed to read them, and written where one is set. All others are harmless.
_VALUES = {"T", "H", "mT", "mH", "real", "imag", "data"}

_VIEW = object()  # replaces a view of memory that will have other values

ATTRIBUTE = "ballast_managed"  # a torch parameter has its ManagedParameter here
ATTRIBUTE_OF_AWAITED = "ballast_wait"  # an AwaitedParameter has this attribute


def _bring_values(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a function of torch while the owners bring the values that it uses."""
    kwargs = kwargs or {}
    if needs_no_values(func):
        with without_torch_function():
            return func(*args, **kwargs)
    if _leaves_as_it_is(func, args, kwargs):
        return None if _name_of(func) == "__set__" else args[0]
    if func in _DIFFERENTIATE:
        arguments = signature(func).bind(*args, **kwargs).arguments
        if any(isinstance(each, Placeholder) for each in arguments["inputs"] or ()):
            return _differentiate(func, arguments)
    flat = _flat(args, kwargs.values())
    views = [each for each in flat if type(each) is OpaqueView]
    used = [(each, owner) for each in flat if (owner := owner_of(each)) is not None]
    used += [(each.ballast_parameter, owner) for each in views if (owner := owner_of(each.ballast_parameter)) is not None]

    def call(*, copied: bool) -> Any:
        with ExitStack() as gathered:
            for owner in dict.fromkeys(owner for _, owner in used):
                mine = [each for each, its_owner in used if its_owner is owner]
                gathered.enter_context(owner.using(mine, _name_of(func), again=bool(views), copied=copied))
            with without_torch_function():
                with_memory = _with_memory(args) if views else args
                named = {key: _with_memory([each])[0] for key, each in kwargs.items()} if views else kwargs
                result = func(*with_memory, **named)
                opaque = [each for each, _ in used if getattr(each, ATTRIBUTE).is_opaque]
                if opaque:
                    return _without_memory(result, opaque)
                if not copied and any(_is_view(each, used) for each in _flat([result])):
                    return _VIEW
                return result

    result = call(copied=False)
    return call(copied=True) if result is _VIEW else result


class Placeholder(torch.nn.Parameter):
    """A parameter without its values. A change of its class makes a parameter one, and an ordinary one again."""

    ballast_managed: ManagedParameter

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter of {tuple(self.shape)}, {self.dtype}, gathered where it is used: with ballast.gather(model): ..."

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    __torch_function__: Any = classmethod(_bring_values)


class GatheredOpaque(torch.nn.Parameter):
    """An opaque parameter while its values are gathered. Its libraries keep views of it for backward, on their own: those are
    gathered again where they are used."""

    ballast_managed: ManagedParameter

    __torch_function__: Any = classmethod(_bring_values)


class OpaqueView(torch.Tensor):
    """A view of an opaque parameter, without memory."""

    ballast_parameter: torch.nn.Parameter
    ballast_begin: int  # its first element, counted from the parameter's

    @staticmethod
    def of(parameter: torch.nn.Parameter, view: torch.Tensor, begin: int) -> OpaqueView:
        made = make_wrapper_tensor(OpaqueView, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device)
        assert isinstance(made, OpaqueView)
        made.ballast_parameter, made.ballast_begin = parameter, begin
        return made

    __torch_function__: Any = classmethod(_bring_values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        refuse(
            f"cannot call {func}: a view of a packed parameter is used where its values are not gathered",
            needed="the view, or the parameter, as an argument of a function of torch",
        )


@cache
def gathered_opaque(kind: type[torch.Tensor]) -> type[GatheredOpaque]:
    """Return the class of a gathered opaque parameter that is of this class in torch's hands."""
    if kind is torch.nn.Parameter:
        return GatheredOpaque
    return type(kind.__name__, (GatheredOpaque, kind), {"__module__": kind.__module__})


def _is_view(value: Any, used: Sequence[tuple[Any, ParameterOwner]]) -> bool:
    """Return whether a result is a view of one of these parameters, and not the parameter itself."""
    if not isinstance(value, torch.Tensor) or any(value is each for each, _ in used):
        return False
    return any(is_alias(value, each) for each, _ in used)


def _leaves_as_it_is(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function changes nothing of a parameter: a cast to its own format, a move to its own device, or its own
    values in place of its values. `model.to(device)` makes one after the other."""
    name = _name_of(func)
    if name not in CASTS and name != "__set__":
        return False  # functions of torch.nn.init are called with keywords only
    parameter = args[0]
    if name == "__set__":
        return parameter is args[1]
    if not isinstance(parameter, Placeholder) or kind_of(parameter) is not torch.nn.Parameter:
        return False
    with without_torch_function():
        probe = nothing_like(parameter, parameter.device)
        return func(probe, *args[1:], **kwargs) is probe


def _differentiate(func: Any, arguments: dict[str, Any]) -> Any:
    """Call torch.autograd.grad() or backward() with edges of the graph in place of parameters, whose values they do not need.
    Their classes stay active: what runs in the backward pass may need values."""
    inputs, makes_graph = arguments["inputs"], arguments.get("create_graph", False)
    fills = arguments.get("materialize_grads", False)  # torch cannot, for edges
    changed = {"materialize_grads": False, "allow_unused": True} if fills else {}
    edge_of = torch.autograd.graph.get_gradient_edge
    with without_torch_function():
        edges = [edge_of(each) if isinstance(each, Placeholder) else each for each in inputs]
    found = func(**{**arguments, **changed, "inputs": edges})
    if not fills:
        return found

    def zeros_like(each: torch.Tensor) -> torch.Tensor:
        return torch.zeros(each.shape, dtype=each.dtype, device=each.device, requires_grad=makes_graph)

    return tuple(zeros_like(each) if gradient is None else gradient for gradient, each in zip(found, inputs))


def _with_memory(values: Sequence[Any]) -> list[Any]:
    """Return the arguments with memory for each view. Its parameter is gathered."""
    found: list[Any] = []
    for each in values:
        if type(each) is OpaqueView:
            parameter = each.ballast_parameter.detach()
            flat = parameter.as_strided((parameter.numel(),), (1,)).view(torch.uint8).view(each.dtype)
            each = flat.as_strided(each.size(), each.stride(), flat.storage_offset() + each.ballast_begin)
        elif isinstance(each, (list, tuple)):
            each = type(each)(_with_memory(each)) if type(each) in (list, tuple) else each
        found.append(each)
    return found


def _without_memory(result: Any, opaque: Sequence[torch.nn.Parameter]) -> Any:
    """Return the result of a function, with an OpaqueView for each view of these parameters."""
    if type(result) in (list, tuple):
        return type(result)(_without_memory(each, opaque) for each in result)
    if not isinstance(result, torch.Tensor) or any(result is parameter for parameter in opaque):
        return result
    for parameter in opaque:
        begin = result.data_ptr() - parameter.data_ptr()
        if result.numel() > 0 and 0 <= begin < parameter.nbytes:
            return OpaqueView.of(parameter, result, begin // result.element_size())
    return result


def kind_of(parameter: torch.Tensor) -> type[torch.Tensor]:
    """Return the class of a parameter in torch's hands, wherever its values are."""
    if (found := managed(parameter)) is not None:
        return found.kind
    return torch.nn.Parameter if hasattr(parameter, ATTRIBUTE_OF_AWAITED) or type(parameter) is Placeholder else type(parameter)


def plain(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter that torch has as a plain tensor: the class of another library may change what
    `.to()` does."""
    if kind_of(parameter) in (torch.nn.Parameter, torch.Tensor) and not isinstance(parameter, GatheredOpaque):
        return parameter.detach()
    with without_torch_function():
        return parameter.detach()


def slice_on_host(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return elements of a tensor that torch has. Their bytes are their values, as those of a lazy conjugate are not."""
    return plain(tensor).reshape(-1)[first : first + count].to("cpu").resolve_conj().resolve_neg().contiguous()


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory. A deferred one reports the device of its future values."""
    with without_any_torch_function():
        return tensor.layout == torch.strided and bool(tensor.is_meta)


def is_opaque(parameter: torch.Tensor) -> bool:
    """Return whether a frozen parameter is kept as bytes: Ballast does not know its format, or its class is that of another
    library, whose values may be packed."""
    return parameter.dtype not in DTYPES or has_foreign_class(parameter)


def has_foreign_class(parameter: torch.Tensor) -> bool:
    return kind_of(parameter) not in (torch.nn.Parameter, torch.Tensor)


def needs_no_values(func: Any) -> bool:
    """Return whether a function of torch uses a parameter without its values."""
    name = _name_of(func)
    return name in _HARMLESS and not (name in ("__get__", "__set__") and func.__self__.__name__ in _VALUES)


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _flat(*values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        for each in value:
            flat += each if isinstance(each, (list, tuple)) else [each]
    return flat


def forget_graphs_of(parameter: torch.nn.Parameter) -> None:
    """Let torch refuse backward of graphs that were made before the parameter loses its values: they would use what replaces
    them."""
    with without_torch_function():
        if not parameter.is_inference():
            torch.autograd.graph.increment_version(parameter)


def nothing_like(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with the parameter's shape, and memory for one element: a NaN, which shows where it is computed with."""
    has_nan = parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1
    nothing = torch.full((), float("nan") if has_nan else 0, dtype=parameter.dtype, device=device)
    return nothing.expand(parameter.shape)
