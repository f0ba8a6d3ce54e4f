"""The optimizer's state in torch's form. It is read when it is used, from the tier where the library keeps it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch

from ballast import _core
from ballast._torch_compat import COPY_AS, make_wrapper_tensor, tree_map, writes_to_arguments
from ballast.checks import fail, refuse
from ballast.connecting import Group
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.updates.sharded_state import ShardedState
from ballast.torch.updates.updates import State

PART = "ballast_part"  # in a state_dict(): the rank that it belongs to
REMEDY = "Call ballast.save() and ballast.load_checkpoint() on all ranks; or save and load a file for each rank."


class LazyState(torch.Tensor):
    """A moment, or the count of steps. Each use reads it, so it needs no memory and is always current."""

    read_now: Callable[[], torch.Tensor]
    place: str

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], name: str, read: Callable[[], torch.Tensor], device: torch.device | None = None
    ) -> LazyState:
        moment: Any = make_wrapper_tensor(cls, shape, dtype=torch.float32, device=device or torch.device("cpu"))
        moment.read_now = read
        moment.place = name
        lazy: LazyState = moment
        return lazy

    def __init__(self, shape: Sequence[int], name: str, read: Callable[[], torch.Tensor], device: torch.device | None = None):
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyState({self.place}, {self.read_now()!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is COPY_AS and _only_moves(kwargs or {}):
            lazy: Any = args[0]
            return LazyState(lazy.shape, lazy.place, lazy.read_now, (kwargs or {})["device"])
        if writes_to_arguments(func) and isinstance(args[0], LazyState):
            fail(
                "unsupported",
                _core.Problem(
                    what=f"cannot change the optimizer's state with {func}: it would change a copy",
                    where=args[0].place,
                    needed="optimizer.load_state_dict()",
                ),
            )
        plain = lambda each: each.read_there() if isinstance(each, LazyState) else each
        return func(*tree_map(plain, tuple(args)), **tree_map(plain, kwargs or {}))

    def read_there(self) -> torch.Tensor:
        return self.read_now().to(self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read_now().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.read_now(), memo)


def _only_moves(kwargs: dict[str, Any]) -> bool:
    """Return whether .to() changes the device and nothing else."""
    return kwargs.get("device") is not None and kwargs.get("dtype", torch.float32) == torch.float32


def is_current_state(loaded: Mapping[int, dict[str, Any]], now: Mapping[torch.Tensor, dict[str, Any]]) -> bool:
    """Return whether the loaded state, by id of the parameter, is the current state.

    Accelerate loads the optimizer's own state_dict() after it has moved it to the optimizer's device.
    """
    return bool(now) and all(
        id(parameter) not in loaded or _are_same(values, loaded[id(parameter)]) for parameter, values in now.items()
    )


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether both are lazy and read the same state."""
    return one.keys() == other.keys() and all(reads_same(value, other[name]) for name, value in one.items())


def reads_same(one: Any, other: Any) -> bool:
    """Return whether both values are lazy and read the same state, on whichever devices."""
    return isinstance(one, LazyState) and isinstance(other, LazyState) and one.read_now is other.read_now


def read_of(state: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the state as it is now."""
    return {key: {name: _now(value) for name, value in values.items()} for key, values in state.items()}


def _now(value: Any) -> Any:
    return value.read_there() if isinstance(value, LazyState) else value


def warn_of_local_shard(group: Group) -> None:
    """Warn that a state_dict() holds one rank's shard. The warning names the line that called state_dict()."""
    warnings.warn(
        f"this state_dict() holds only the shard of rank {group.rank} of {group.size}, and rank 0's alone cannot be resumed. "
        + REMEDY,
        UserWarning,
        stacklevel=3,
    )


def require_local_shard(state_dict: Mapping[str, Any], group: Group) -> None:
    """Refuse the shard of another rank, and one of another number of ranks."""
    part = state_dict.get(PART)
    if part is None or not state_dict["state"] or part == {"rank": group.rank, "ranks": group.size}:
        return
    fail(
        "unsupported",
        _core.Problem(
            what=f"rank {group.rank} of {group.size} cannot load the state_dict() of rank {part['rank']} of {part['ranks']}",
            needed="its own: each rank keeps a shard of the state",
            remedy=REMEDY,
        ),
    )


class ShownState:
    """The state that optimizer.state shows of trained parameters. It notices when the user puts other objects in their place,
    and looks at no value."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, LazyState]] = {}  # by id of the parameter
        self._objects: StateObjects | None = None  # when the state was last found to be as it was shown

    def show(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, values: dict[str, LazyState]) -> None:
        optimizer.state[parameter] = {**values}
        self._values[id(parameter)] = values

    def is_as_shown(self, optimizer: torch.optim.Optimizer, members: Sequence[UnitParameter]) -> bool:
        if self._objects is None or not self._objects.are_in(optimizer.state):
            if not all(self._has_kept(optimizer, member.parameter) for member in members):
                return False
            self._objects = StateObjects(optimizer.state)
        return True

    def _has_kept(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
        now, shown = optimizer.state.get(parameter), self._values.get(id(parameter))
        if not isinstance(now, dict) or shown is None or not all(reads_same(now.get(name), shown[name]) for name in shown):
            return False
        self._values[id(parameter)] = {name: now[name] for name in shown}  # they may be on another device
        return True


class StateObjects:
    """All keys, dictionaries and values of an optimizer.state. Each step compares them twice, so no Python code runs for each
    parameter."""

    def __init__(self, state: Mapping[Any, Any]):
        self._keys = [*state]
        self._entries = [each for each in state.values() if isinstance(each, dict)]
        self._values = [*_values_in(self._entries)]

    def are_in(self, state: Mapping[Any, Any]) -> bool:
        if len(state) != len(self._entries) or not all(map(is_, state, self._keys)):
            return False
        if not all(map(is_, state.values(), self._entries)) or sum(map(len, self._entries)) != len(self._values):
            return False
        return all(map(is_, _values_in(self._entries), self._values))


def _values_in(entries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, entries))


def changed_state(optimizer: torch.optim.Optimizer, shards: ShardedState, members: Sequence[UnitParameter]) -> State:
    """Return optimizer.state, which the user has changed. It may lack state of all of these members."""
    missing = [member for member in members if member.parameter not in optimizer.state]
    if 0 < len(missing) < len(members) and shards.sharing is not None:
        refuse(
            "cannot take over optimizer.state: the state of some parameters was removed, and ranks have shards of the rest",
            where=f"parameter {missing[0].name}",
            needed="optimizer.state.clear(); or stage 0",
        )
    return {id(parameter): values for parameter, values in optimizer.state.items()}


class InLibrary(Enum):
    """Stands for a value of each element that the partition has already. It is the same object in all processes."""

    IN_LIBRARY = "in the library"


IN_LIBRARY = InLibrary.IN_LIBRARY


def moments_in(
    state: State, shards: ShardedState, names: Sequence[tuple[_core.Moment, str]]
) -> dict[tuple[int, _core.Moment], torch.Tensor]:
    """Return the moments that the state has, as the library takes them over."""
    moments = {}
    for member in shards.members:
        for moment, name in names:
            value = state.get(id(member.parameter), {}).get(name)
            if value is not None and value is not IN_LIBRARY:
                moments[id(member.parameter), moment] = full_moment(shards, member, value)
    return moments


def lazy_moment(shards: ShardedState, member: UnitParameter, moment: _core.Moment, name: str) -> LazyState:
    """Return a value of each element that is read when it is used: full if this rank keeps all of it, else its shard,
    one-dimensional."""
    first, count = shards.part(member)
    is_full = count == member.parameter.numel()

    def read() -> torch.Tensor:
        full = shards.read_moment(member, moment)
        return full if is_full else full.view(-1)[first : first + count].clone()

    shape = tuple(member.parameter.shape) if is_full else (count,)
    return LazyState(shape, f"{member.name}, {name}", read)


def begun_in(state: State, moments: State) -> State:
    """Return the moments that the state has, of parameters that are not trained any more. `state` has IN_LIBRARY in their
    place."""
    return {
        key: {name: value for name, value in values.items() if state[key].get(name) is IN_LIBRARY}
        for key, values in moments.items()
        if state.get(key)
    }


def full_moment(shards: ShardedState, member: UnitParameter, value: torch.Tensor) -> torch.Tensor:
    """Return the moment in fp32, with zeros where other ranks keep it."""
    shape = member.parameter.shape
    value = value.detach().to("cpu", torch.float32).contiguous()
    if value.shape == shape:
        return value
    first, count = shards.part(member)
    if value.numel() != count:
        refuse_size(member, value, count)
    full = torch.zeros(shape, dtype=torch.float32, device="cpu")
    full.view(-1)[first : first + count] = value.view(-1)
    return full


def refuse_size(member: UnitParameter, value: torch.Tensor, of_shard: int) -> NoReturn:
    """Refuse a value by element that has neither the parameter's shape nor as many elements as this rank's shard."""
    refuse(
        f"cannot load state of {value.numel()} elements: the parameter has another size",
        where=f"parameter {member.name}",
        needed=f"{tuple(member.parameter.shape)}, or this rank's shard of {of_shard} elements",
    )
