"""A parameter whose values Ballast keeps: its states, its owner, and the effect of each transition on torch's parameter.

DEFERRED ── materialise ──> SHARDED <── gather, reshard ──> GATHERED        (stage 3)
                               │ ▲
                       offload │ │ reload       FULL (stages 0 to 2)        RELEASED at the end
                               ▼ │
                            OFFLOADED
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, Protocol

import torch

from ballast import _core
from ballast.checks import fail, refuse_order
from ballast.connecting import Group
from ballast.torch.parameters.placeholder import ATTRIBUTE, Placeholder, gathered_opaque, kind_of, nothing_like
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.parameters.units import is_opaque


class ParameterState(Enum):
    """Where the values of a parameter are."""

    following: tuple[ParameterState, ...]  # from TRANSITIONS; each call of a module needs them, so this look-up uses no hash

    DEFERRED = "deferred"  # nowhere yet: they are made, or read from files, when training begins
    PENDING = "pending"  # not here: a checkpoint, or the migration to the next partition, brings them
    SHARDED = "sharded"  # each rank keeps its shard (stage 3)
    GATHERED = "gathered"  # torch sees all of them, in memory that is acquired for a while (stage 3)
    FULL = "full"  # torch sees all of them, in memory that stays (stages 0 to 2)
    OFFLOADED = "offloaded"  # off the device, until reload()
    RELEASED = "released"  # torch has them in memory of its own: Ballast no longer manages the parameter
    LOST = "lost"  # the training has ended without all of its ranks, and the values with it


TRANSITIONS: Mapping[ParameterState, frozenset[ParameterState]] = {
    ParameterState.DEFERRED: frozenset(
        {ParameterState.PENDING, ParameterState.SHARDED, ParameterState.FULL, ParameterState.RELEASED}
    ),
    ParameterState.PENDING: frozenset(  # DEFERRED: other values are read instead, or nothing brings them any more
        {ParameterState.DEFERRED, ParameterState.SHARDED, ParameterState.FULL, ParameterState.RELEASED}
    ),
    ParameterState.SHARDED: frozenset(  # PENDING: the next partition gets the shard
        {
            ParameterState.GATHERED,
            ParameterState.OFFLOADED,
            ParameterState.PENDING,
            ParameterState.RELEASED,
            ParameterState.LOST,
        }
    ),
    # LOST: an optimizer may be deleted inside a gather() block.
    ParameterState.GATHERED: frozenset({ParameterState.SHARDED, ParameterState.LOST}),
    ParameterState.FULL: frozenset({ParameterState.OFFLOADED, ParameterState.RELEASED}),
    ParameterState.OFFLOADED: frozenset({ParameterState.SHARDED, ParameterState.FULL, ParameterState.LOST}),
    ParameterState.RELEASED: frozenset(),
    # If a partition could not be made, the migration still has the values, or a checkpoint brings others.
    ParameterState.LOST: frozenset({ParameterState.PENDING}),
}


for _state, _following in TRANSITIONS.items():
    _state.following = tuple(_following)


def require_transition(before: ParameterState, after: ParameterState) -> None:
    """Raise B1999 unless this transition exists. Staying in a state is always possible."""
    if after is not before and after not in before.following:
        _refuse(before, after)


def _refuse(before: ParameterState, after: ParameterState) -> NoReturn:
    possible = ", ".join(state.name for state in ParameterState if state in TRANSITIONS[before])
    problem = _core.Problem(
        what=f"cannot change a parameter from {before.name} to {after.name}: there is no such transition",
        needed=f"{before.name} to {possible}" if possible else f"nothing: {before.name} is the end",
    )
    fail("internal", problem)


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


@dataclass(frozen=True)
class Recorded:
    """Initial values that recorded operations of torch make, or read from files."""

    tensor: torch.Tensor  # on the meta device


@dataclass(frozen=True)
class Unknown:
    """There are no initial values yet."""


InitialValues = Recorded | Unknown


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
        initial: InitialValues = Unknown(),
    ):
        self._parameter = weakref.ref(parameter)  # which owns this object
        self.kind = kind_of(parameter)
        self.is_opaque = is_opaque(parameter)
        self._gathered_kind = gathered_opaque(self.kind) if self.is_opaque else self.kind
        self._state = state
        self.owner = owner  # none: the model is not wrapped yet, or torch has the values
        self.initial = initial  # while it is DEFERRED
        self.unit: int | None = None  # while it is SHARDED or GATHERED: parameters of one unit are gathered together
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
        is_unknown = isinstance(self.initial, Unknown)
        return self.owner is not None and self._state is ParameterState.DEFERRED and is_unknown

    # --- Before training ---

    def defer(self, owner: ParameterOwner) -> None:
        """Let a training own a parameter that has no memory."""
        self._enter(ParameterState.DEFERRED)
        self.owner = owner
        self.parameter.__class__ = Placeholder

    def begin_with(self, initial: InitialValues) -> None:
        """Begin with these values, instead of others."""
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

    def drop(self) -> None:
        """Become DEFERRED without initial values: nothing brings them any more."""
        self.begin_with(Unknown())

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
        this one, of the memory that they were gathered into."""
        if self._state is not _GATHERED:
            require_transition(self._state, _SHARDED)
        self._state = _SHARDED
        parameter = self._parameter()
        if parameter is None:  # Python's collector is deleting it, see is_collected
            return None
        if self.is_opaque:
            parameter.__class__ = _PLAIN
        version, written = parameter._version, None
        if version != self._version or parameter.data_ptr() != address:
            self._version, written = version, parameter.data
        parameter.data = nothing
        parameter.__class__ = Placeholder
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
        parameter, self.owner, self.initial = self.parameter, owner, Unknown()
        parameter.__class__ = _PLAIN
        self._version = parameter._version
        parameter.data = nothing
        setattr(parameter, ATTRIBUTE, self)
        parameter.__class__ = Placeholder

    def _return_to_torch(self, values: torch.Tensor | None) -> None:
        parameter, self.owner, self.initial = self.parameter, None, Unknown()
        parameter.__class__ = self.kind
        vars(parameter).pop(ATTRIBUTE, None)
        if values is not None:
            parameter.data = values


def managed(parameter: torch.Tensor) -> ManagedParameter | None:
    """Return the ManagedParameter of a parameter; None if torch has the values in memory that stays."""
    found: ManagedParameter | None = getattr(parameter, ATTRIBUTE, None)
    return found


def owner_of(parameter: torch.Tensor) -> ParameterOwner | None:
    """Return the owner of the values; None if torch has them, or if the model is not wrapped yet."""
    found = managed(parameter)
    return None if found is None else found.owner


def by_owner(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[ParameterOwner, list[torch.nn.Parameter]]]:
    """Group the parameters that have an owner by it."""
    found: dict[int, tuple[ParameterOwner, list[torch.nn.Parameter]]] = {}
    for parameter in parameters:
        owner = owner_of(parameter)
        if owner is not None:
            found.setdefault(id(owner), (owner, []))[1].append(parameter)
    return list(found.values())


def is_without_values(parameter: torch.Tensor) -> bool:
    """Return whether a training owns the parameter, and has no values of it yet."""
    found = managed(parameter)
    return found is not None and found.is_without_values


def lacks_values(parameter: torch.Tensor) -> bool:
    """Return whether training cannot begin because the parameter has no initial values."""
    found = managed(parameter)
    return found is not None and found.lacks_values
