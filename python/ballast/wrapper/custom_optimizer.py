"""Optimizers without a rule of the library: their own step runs on this rank's part of each parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.wrapper.collectives import from_all_ranks
from ballast.wrapper.memory import tensor_of
from ballast.wrapper.rules import Group, Rule, require_elementwise, rule_of
from ballast.wrapper.sharded_state import ShardedState
from ballast.wrapper.units import Member
from ballast.wrapper.updates import RuleUpdates, State, Updates

Part = tuple[int, int]  # of a parameter's elements: first, count
HIDDEN = ("grad_scale", "found_inf")  # from a gradient scaler: what they ask for has been done


class CustomUpdates:
    """Those of the optimizer's own step. Its state is torch's, made by that step beside the parts, and lives in
    optimizer.state: of all of a parameter where this rank keeps all, else of its part, one-dimensional."""

    def __init__(self, kind: type[torch.optim.Optimizer]):
        step: Any = kind.step
        self._step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._parts: dict[int, torch.nn.Parameter] = {}  # by id of the parameter: its numbers in fp32, as a tensor

    def rule(self, group: Group) -> Rule:
        return _core.External()

    def moments(self, optimizer: torch.optim.Optimizer) -> list[tuple[_core.Moment, str]]:
        return []

    def own_step(
        self, optimizer: torch.optim.Optimizer, partition: ShardedState, tiles: Sequence[_core.TileToUpdate], factor: float
    ) -> None:
        """Between the library's sum of gradients and its use of the new parameters."""
        for tile in tiles:
            gradients = tensor_of(tile.gradients, torch.float32).mul_(factor)
            masters = tensor_of(tile.masters, torch.float32)
            for member, begin in partition.in_tile(tile.unit, tile.first):
                count = partition.part(member)[1]
                shape = shape_of(member, count)
                part = self._part(optimizer, member, masters[begin:][:count].view(shape))
                part.grad = gradients[begin:][:count].view(shape).to(part.device)
        with on_shards(optimizer, self._parts):
            self._step(optimizer)
        for part in self._parts.values():
            part.grad = None
        for gpu in {part.device for part in self._parts.values() if part.device.type == "cuda"}:
            torch.cuda.current_stream(gpu).synchronize()  # the library goes on in streams of its own

    def _part(self, optimizer: torch.optim.Optimizer, member: Member, numbers: torch.Tensor) -> torch.nn.Parameter:
        key = id(member.parameter)
        if key not in self._parts:
            self._parts[key] = torch.nn.Parameter(numbers)
            move_state_to(optimizer, member.parameter, numbers)
        elif self._parts[key].data_ptr() != numbers.data_ptr():
            self._parts[key].data = numbers
        return self._parts[key]

    def begin(self, optimizer: torch.optim.Optimizer, partition: ShardedState, state: State) -> None:
        for member in partition.members:
            part = partition.part(member)
            values = state.get(id(member.parameter))
            if values and part[1] > 0:
                optimizer.state[member.parameter] = {
                    name: shard_of_value(member, part, value) for name, value in values.items()
                }

    def left_of_state(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> None:
        return None  # it is the state itself

    def take_out(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> State:
        kept = [
            (partition.part(member), to_host(optimizer.state.get(member.parameter, {})))
            for member in partition.members
        ]
        of_all = from_all_ranks(partition.ranks, kept)
        state = {}
        for number, member in enumerate(partition.members):
            if values := whole_state(member, [of_rank[number] for of_rank in of_all]):
                state[id(member.parameter)] = values
        return state

    def leave(self) -> None:
        self._parts = {}

    def leave_device(self, optimizer: torch.optim.Optimizer) -> None:
        self._parts = {}
        for parameter, values in optimizer.state.items():
            optimizer.state[parameter] = to_host(values)

    def state_bytes(self, optimizer: torch.optim.Optimizer, partition: ShardedState) -> int:
        kept = [optimizer.state.get(member.parameter, {}) for member in partition.members]
        return sum(value.nbytes for values in kept for value in values.values() if isinstance(value, torch.Tensor))


def updates_of(optimizer: torch.optim.Optimizer, *, declared: bool) -> Updates:
    """By a rule of the library, if it has one; else by the optimizer's own step. `declared`: the user says that this does the
    same to each element."""
    make_rule = rule_of(optimizer)
    if make_rule is not None:
        return RuleUpdates(make_rule)
    require_elementwise(optimizer, declared)
    return CustomUpdates(type(optimizer))


@contextmanager
def on_shards(optimizer: torch.optim.Optimizer, parts: dict[int, torch.nn.Parameter]) -> Iterator[None]:
    """The optimizer with parts in the place of parameters, for its own step; all else is as it is, and may change."""
    whole = [group["params"] for group in optimizer.param_groups]
    hidden = {name: vars(optimizer).pop(name) for name in HIDDEN if name in vars(optimizer)}
    shown = optimizer.state
    own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    parameters = [parameter for params in whole for parameter in params if id(parameter) in parts]
    for parameter in parameters:
        if parameter in shown:
            own[parts[id(parameter)]] = shown[parameter]
    try:
        optimizer.state = own
        for group, params in zip(optimizer.param_groups, whole):
            group["params"] = [parts[id(parameter)] for parameter in params if id(parameter) in parts]
        yield
    finally:
        optimizer.state = shown
        for group, params in zip(optimizer.param_groups, whole):
            group["params"] = params
        for parameter in parameters:
            if values := own.get(parts[id(parameter)]):
                shown[parameter] = values
        vars(optimizer).update(hidden)


def shape_of(member: Member, count: int) -> torch.Size:
    """Of a part."""
    shape = member.parameter.shape
    return shape if count == shape.numel() else torch.Size([count])


def shard_of_value(member: Member, part: Part, value: Any) -> Any:
    """This rank's part of a value of the state, if there is one for each element; a copy."""
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


def move_state_to(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, numbers: torch.Tensor) -> None:
    """State that came from elsewhere goes beside the part, as torch has it: a count of steps stays on the host, unless a
    kernel counts it."""
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    values = optimizer.state.get(parameter, {})
    for name, value in values.items():
        counted_on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
        if isinstance(value, torch.Tensor) and not counted_on_host:
            values[name] = value.to(numbers.device, numbers.dtype if value.is_floating_point() else value.dtype)


def to_host(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def whole_state(member: Member, kept: Sequence[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """Of what ranks keep of a parameter: of one number for each element all of them, of others the first rank's."""
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
            whole = torch.zeros(member.parameter.numel(), dtype=value.dtype)
            for (first, count), values in kept:
                whole[first : first + count] = values[name].view(-1)
            value = whole.view(member.parameter.shape)
        state[name] = value
    return state
