"""Optimizers without a rule of the library: their own step runs on this rank's shard of each parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.wrapper.collectives import from_all_ranks
from ballast.wrapper.gpu import wait_for_current_streams
from ballast.wrapper.memory import tensor_of
from ballast.wrapper.rules import Group, Rule, require_elementwise, rule_of
from ballast.wrapper.sharded_state import ShardedState
from ballast.wrapper.units import TORCH_DTYPES, Member
from ballast.wrapper.updates import RuleUpdates, State, Updates

Part = tuple[int, int]  # a range of a parameter's elements: first, count
HIDDEN = ("grad_scale", "found_inf")  # from a gradient scaler: the library has done its work already


class CustomUpdates:
    """Updates by the optimizer's own step. The state that the step makes lives in optimizer.state. It is that of the
    full parameter if this rank keeps all of it, else that of its shard, which is one-dimensional."""

    def __init__(self, kind: type[torch.optim.Optimizer]):
        step: Any = kind.step
        self._step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._parts: dict[int, torch.nn.Parameter] = {}  # by id of the parameter: its shard in fp32

    def rule(self, group: Group) -> Rule:
        return _core.External()

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        return []

    def own_step(
        self, optimizer: torch.optim.Optimizer, kept: ShardedState, tiles: Sequence[_core.TileToUpdate], factor: float
    ) -> None:
        """Run the step between the library's sum of gradients and its use of the new parameters."""
        for tile in tiles:
            gradients = tensor_of(tile.gradients, TORCH_DTYPES[tile.gradient_dtype]).float().mul_(factor)
            masters = tensor_of(tile.masters, torch.float32)
            for member, begin in kept.in_tile(tile.unit, tile.first):
                count = kept.part(member)[1]
                shape = shape_of(member, count)
                part = self._part(optimizer, member, masters[begin:][:count].view(shape))
                part.grad = gradients[begin:][:count].view(shape).to(part.device)
        with on_shards(optimizer, self._parts):
            self._step(optimizer)
        for part in self._parts.values():
            part.grad = None
        wait_for_current_streams(list(self._parts.values()))  # the library continues in streams of its own

    def _part(self, optimizer: torch.optim.Optimizer, member: Member, values: torch.Tensor) -> torch.nn.Parameter:
        key = id(member.parameter)
        if key not in self._parts:
            self._parts[key] = torch.nn.Parameter(values)
            move_state_to(optimizer, member.parameter, values)
        elif self._parts[key].data_ptr() != values.data_ptr():
            self._parts[key].data = values
        return self._parts[key]

    def begin(self, optimizer: torch.optim.Optimizer, kept: ShardedState, state: State) -> None:
        for member in kept.members:
            part = kept.part(member)
            values = state.get(id(member.parameter))
            if values and part[1] > 0:
                optimizer.state[member.parameter] = {
                    name: shard_of_value(member, part, value) for name, value in values.items()
                }

    def left_of_state(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> None:
        return None  # optimizer.state is the state itself

    def take_out(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> State:
        mine = [
            (kept.part(member), to_host(optimizer.state.get(member.parameter, {})))
            for member in kept.members
        ]
        of_all = from_all_ranks(kept.ranks, mine)
        state = {}
        for number, member in enumerate(kept.members):
            if values := full_state(member, [of_rank[number] for of_rank in of_all]):
                state[id(member.parameter)] = values
        return state

    def forget_partition(self) -> None:
        self._parts = {}

    def offload(self, optimizer: torch.optim.Optimizer) -> None:
        self._parts = {}
        for parameter, values in optimizer.state.items():
            optimizer.state[parameter] = to_host(values)

    def state_bytes(self, optimizer: torch.optim.Optimizer, kept: ShardedState) -> int:
        states = [optimizer.state.get(member.parameter, {}) for member in kept.members]
        return sum(value.nbytes for values in states for value in values.values() if isinstance(value, torch.Tensor))


def updates_of(optimizer: torch.optim.Optimizer, *, declared: bool) -> Updates:
    """Return updates by a rule of the library, if it has one; else by the optimizer's own step. `declared` is true if
    the user declares that this step does the same to each element."""
    make_rule = rule_of(optimizer)
    if make_rule is not None:
        return RuleUpdates(make_rule)
    require_elementwise(optimizer, declared)
    return CustomUpdates(type(optimizer))


@contextmanager
def on_shards(optimizer: torch.optim.Optimizer, parts: dict[int, torch.nn.Parameter]) -> Iterator[None]:
    """Replace the optimizer's parameters by shards inside the block, for its own step. The step may change everything
    else."""
    full = [group["params"] for group in optimizer.param_groups]
    hidden = {name: vars(optimizer).pop(name) for name in HIDDEN if name in vars(optimizer)}
    shown = optimizer.state
    own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    parameters = [parameter for params in full for parameter in params if id(parameter) in parts]
    for parameter in parameters:
        if parameter in shown:
            own[parts[id(parameter)]] = shown[parameter]
    try:
        optimizer.state = own
        for group, params in zip(optimizer.param_groups, full):
            group["params"] = [parts[id(parameter)] for parameter in params if id(parameter) in parts]
        yield
    finally:
        optimizer.state = shown
        for group, params in zip(optimizer.param_groups, full):
            group["params"] = params
        for parameter in parameters:
            if values := own.get(parts[id(parameter)]):
                shown[parameter] = values
        vars(optimizer).update(hidden)


def shape_of(member: Member, count: int) -> torch.Size:
    """Return the shape of a shard."""
    shape = member.parameter.shape
    return shape if count == shape.numel() else torch.Size([count])


def shard_of_value(member: Member, part: Part, value: Any) -> Any:
    """Return a copy of a value of the state. If it has a number for each element, return only those of this shard."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    first, count = part
    if value.shape == member.parameter.shape:
        return value.reshape(-1)[first:][:count].clone().view(shape_of(member, count))
    if value.numel() not in (1, count):
        refuse(
            f"cannot load state of {value.numel()} elements: the parameter has another size",
            where=f"parameter {member.name}",
            needed=f"{tuple(member.parameter.shape)}, or this rank's shard of {count} elements",
        )
    return value.clone()


def move_state_to(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, shard: torch.Tensor) -> None:
    """Move loaded state to the device of the shard, as torch does. A count of steps stays on the host, unless a kernel
    counts the steps."""
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    values = optimizer.state.get(parameter, {})
    for name, value in values.items():
        counted_on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
        if isinstance(value, torch.Tensor) and not counted_on_host:
            values[name] = value.to(shard.device, shard.dtype if value.is_floating_point() else value.dtype)


def to_host(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def full_state(member: Member, kept: Sequence[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """Return the full state of a parameter. Values by element are joined from all shards; others are the first rank's."""
    kept = [(part, values) for part, values in kept if values]
    if not kept:
        return {}
    state = {}
    for name, value in kept[0][1].items():
        by_element = all(
            isinstance(values.get(name), torch.Tensor) and values[name].shape == shape_of(member, part[1])
            for part, values in kept
        )
        if by_element:
            full = torch.zeros(member.parameter.numel(), dtype=value.dtype, device="cpu")
            for (first, count), values in kept:
                full[first : first + count] = values[name].view(-1)
            value = full.view(member.parameter.shape)
        state[name] = value
    return state
