"""The optimizer's state in torch's form. It is read when it is used, from the tier where it is kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import COPY_AS, make_wrapper_tensor, tree_map, writes_to_arguments
from ballast.checks import fail
from ballast.connecting import Group

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

    def __init__(
        self, shape: Sequence[int], name: str, read: Callable[[], torch.Tensor], device: torch.device | None = None
    ):
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
