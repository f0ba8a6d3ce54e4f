"""Save and load the state of optimizers whose own step makes the updates: all that they keep of a parameter, by its name
in their state. State with a value for each element is saved by element, so that other ranks can read any shard of it.
Other state is small, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ballast import _core
from ballast.checkpoint.manifest import CUSTOM
from ballast.checkpoint.tensors import PlainTensor, Target, TorchTensor, Writers, frozen_state, moment_name
from ballast.checks import refuse
from ballast.ranks import Agreement, from_all_ranks
from ballast.torch.parts import part_of
from ballast.torch.training.partition import Partition
from ballast.torch.training.training import Training
from ballast.torch.updates.custom_step import shape_of
from ballast.torch.updates.sharded_state import IN_LIBRARY, State

BY_ELEMENT, AS_IT_IS, NUMBER = CUSTOM
NUMBERS = {int: torch.int64, float: torch.float64}

# The first element of this rank's shard by parameter, and the state with a value for each of its elements.
LocalShards = dict[str, tuple[int, dict[str, torch.Tensor]]]


def custom_state(access: Training, partition: Partition, names: Mapping[int, str]) -> Iterator[TorchTensor]:
    """Yield the state in the same order on all ranks. Some ranks have no shard of a parameter."""
    agreement = Agreement(access.group, "saving an optimizer's own state")
    with agreement.settled():  # another rank may hold another kind of state
        mine, shards = _local_state(access, partition, names)
    parameters = {names[id(parameter)]: parameter for _, parameter in access.parameters()}
    in_turns = access.options.stage == 0
    frozen = {names[id(parameter)] for parameter, _ in frozen_state(access)}
    for name, kinds in _merged(from_all_ranks(access.group, mine)).items():
        for key, described in kinds.items():
            if isinstance(described, torch.dtype):
                first, mine_by_key = shards.get(name, (0, {}))
                value = mine_by_key.get(key, torch.empty(0, dtype=described, device="cpu"))
                writers = Writers.in_turns if in_turns or name in frozen else Writers.each
                held = TorchTensor(moment_name(name, key), BY_ELEMENT, value, writers, begin=first)
                yield held.of(access, parameters[name])
            else:
                role, tensor = described
                yield TorchTensor(moment_name(name, key), role, tensor, Writers.first)


def _local_state(
    access: Training, partition: Partition, names: Mapping[int, str]
) -> tuple[dict[str, dict[str, Any]], LocalShards]:
    """Return, by parameter, the description of its state for other ranks, and this rank's shard of state with a value
    for each element."""
    mine: dict[str, dict[str, Any]] = {}
    shards: LocalShards = {}

    def add(name: str, values: Mapping[str, Any], shape: torch.Size, first: int) -> None:
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        whole = access.updates.whole_values
        by_element = {key: value for key, value in tensors.items() if value.shape == shape and key not in whole}
        mine[name] = {key: _description(moment_name(name, key), value, key in by_element) for key, value in values.items()}
        shards[name] = (first, by_element)

    for member in partition.members:
        first, count = partition.part(member)
        add(names[id(member.parameter)], access.optimizer.state.get(member.parameter, {}), shape_of(member, count), first)
    for parameter, values in frozen_state(access):
        add(names[id(parameter)], values, parameter.shape, 0)
    return mine, shards


def _description(where: str, value: Any, is_by_element: bool) -> Any:
    """Describe a value to other ranks: its dtype if it has a value for each element, else its role and the value
    itself."""
    if is_by_element:
        return value.dtype
    if isinstance(value, torch.Tensor):
        return AS_IT_IS, value.detach().cpu()
    if type(value) not in NUMBERS:
        refuse(
            f"cannot save an optimizer whose state holds a {type(value).__name__}: checkpoints hold tensors and numbers",
            where=where,
            needed="tensors, and numbers of the types int and float",
            remedy="Keep it in the parameter group: options may be text, None, and lists too.",
        )
    return NUMBER, torch.tensor(value, dtype=NUMBERS[type(value)], device="cpu")


def _merged(all_states: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Take, for each parameter, the description of the first rank that has one."""
    merged: dict[str, dict[str, Any]] = {}
    for states in all_states:
        for name, kinds in states.items():
            if kinds:
                merged.setdefault(name, kinds)
    return merged


class CustomState:
    """The state that is loaded: this rank's shards, and the full state of frozen parameters."""

    def __init__(self, access: Training, tensors: Mapping[str, _core.SavedTensor], names: Mapping[int, str]):
        self._access = access
        self._names = names
        self._entries: dict[
            str, dict[str, _core.SavedTensor]
        ] = {}  # keys: the parameter, and the name in the optimizer's state
        for name, entry in tensors.items():
            parameter, colon, key = name.rpartition(": ")
            if colon and entry.role in CUSTOM:
                self._entries.setdefault(parameter, {})[key] = entry
        self._values: State = {}
        self._stored: State = {}  # values that the library keeps: IN_LIBRARY

    def frozen(self) -> State:
        """Allocate the state of frozen parameters, which targets() fills."""
        for _, parameter in self._access.parameters():
            if not parameter.requires_grad:
                self._make(parameter, parameter.shape)
        return dict(self._values)

    def require_stored(self) -> None:
        """Refuse state of each element for which the library keeps no room."""
        known = self._access.names_of_stored_values()
        for name, entries in self._entries.items():
            for key, entry in entries.items():
                if known and entry.role == BY_ELEMENT and entry.elements > 1 and key not in known:
                    refuse(
                        f"cannot load the optimizer's state {key}: the library keeps {', '.join(known)} of each element",
                        where=f"parameter {name}",
                        needed="the same options of the optimizer; or its state in memory",
                    )

    def stored(self, parameter: str) -> list[tuple[int, _core.SavedTensor]]:
        """Return the values of each element that the library keeps of this parameter: their number there, and their
        entry."""
        entries = self._entries.get(parameter, {})
        names = enumerate(self._access.names_of_stored_values())
        return [(number, entries[name]) for number, name in names if name in entries]

    def targets(self, partition: Partition) -> list[Target]:
        """Allocate this rank's shards, without the values that the library keeps, and return the targets of the
        checkpoint's tensors."""
        begins: dict[int, int] = {}
        parts = {id(parameter): part_of(parameter) for _, parameter in self._access.parameters()}
        stored = self._access.names_of_stored_values()
        for member in partition.members:
            first, count = partition.part(member)
            if count > 0:
                begins[id(member.parameter)] = first
                self._make(member.parameter, shape_of(member, count), without=stored)
        targets: list[Target] = []
        for key, values in self._values.items():
            name = self._names[key]
            for kind, value in values.items():
                entry = self._entries[name][kind]
                first, part = (begins.get(key, 0), parts[key]) if entry.role == BY_ELEMENT else (0, None)
                targets.append(PlainTensor(moment_name(name, kind), entry, value, first, part))
        return targets

    def _make(self, parameter: torch.nn.Parameter, shape: torch.Size, without: Collection[str] = ()) -> None:
        entries = self._entries.get(self._names[id(parameter)], {})
        self._stored[id(parameter)] = {key: IN_LIBRARY for key in entries if key in without}
        if entries:
            self._values[id(parameter)] = {
                key: torch.empty(
                    shape if entry.role == BY_ELEMENT else entry.shape, dtype=getattr(torch, entry.dtype), device="cpu"
                )
                for key, entry in entries.items()
                if key not in without
            }

    def install(self, partition: Partition) -> None:
        """Give the state of trained parameters to the optimizer, once it is read."""
        state: State = {}
        for key, values in self._values.items():
            entries = self._entries[self._names[key]]
            values.update({name: value.item() for name, value in values.items() if entries[name].role == NUMBER})
            everything = {**self._stored[key], **values}
            state[key] = {name: everything[name] for name in entries}
        self._access.updates.install(self._access.optimizer, partition, state)
