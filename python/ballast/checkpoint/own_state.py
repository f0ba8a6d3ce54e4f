"""State of optimizers whose own step makes the updates: whatever they keep of a parameter, by its name there. What has a number
for each element is saved as such, and can be cut for other ranks; the rest is small, and the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ballast.agreement import Agreement
from ballast.checkpoint.held import Held, Writers, moment_name, state_aside
from ballast.checkpoint.manifest import OWN, Tensor
from ballast.checkpoint.targets import PlainTensor, Target
from ballast.checks import refuse
from ballast.wrapper.checkpoint_access import CheckpointAccess as Session
from ballast.wrapper.everybody import from_all_ranks
from ballast.wrapper.own_step import shape_of
from ballast.wrapper.partition import Partition
from ballast.wrapper.updates import State

BY_ELEMENT, AS_IT_IS, NUMBER = OWN
NUMBERS = {int: torch.int64, float: torch.float64}


Stretches = dict[str, tuple[int, dict[str, torch.Tensor]]]  # by parameter: the first element, and what has one for each


def own_state(session: Session, partition: Partition, names: Mapping[int, str]) -> Iterator[Held]:
    """In the same order on all ranks, of which some have nothing of a parameter."""
    together = Agreement(session.group, "saving an optimizer's own state")
    with together.attempt():  # of which another rank may have something else
        mine, stretches = _of_this_rank(session, partition, names)
    together.settle()
    shapes = {names[id(parameter)]: parameter.shape for _, parameter in session.parameters()}
    in_turns = session.options.stage == 0
    frozen = {names[id(parameter)] for parameter, _ in state_aside(session)}
    for name, kinds in _merged(from_all_ranks(session.group, mine)).items():
        for key, told in kinds.items():
            if isinstance(told, torch.dtype):
                first, own = stretches.get(name, (0, {}))
                value = own.get(key, torch.empty(0, dtype=told))
                writers = Writers.in_turns if in_turns or name in frozen else Writers.each
                yield Held(moment_name(name, key), BY_ELEMENT, value, writers, begin=first, whole=shapes[name])
            else:
                role, tensor = told
                yield Held(moment_name(name, key), role, tensor, Writers.first)


def _of_this_rank(
    session: Session, partition: Partition, names: Mapping[int, str]
) -> tuple[dict[str, dict[str, Any]], Stretches]:
    """By parameter: what other ranks are told of its state, and what this rank has of that for each element."""
    mine: dict[str, dict[str, Any]] = {}
    stretches: Stretches = {}

    def add(name: str, values: Mapping[str, Any], shape: torch.Size, first: int) -> None:
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        by_element = {key: value for key, value in tensors.items() if value.shape == shape}
        mine[name] = {key: _told(moment_name(name, key), value, key in by_element) for key, value in values.items()}
        stretches[name] = (first, by_element)

    for member in partition.members:
        first, count = partition.part(member)
        add(names[id(member.parameter)], session.optimizer.state.get(member.parameter, {}), shape_of(member, count), first)
    for parameter, values in state_aside(session):
        add(names[id(parameter)], values, parameter.shape, 0)
    return mine, stretches


def _told(where: str, value: Any, is_by_element: bool) -> Any:
    """To other ranks: the format of what has a number for each element; else its role, and all of it."""
    if is_by_element:
        return value.dtype
    if isinstance(value, torch.Tensor):
        return AS_IT_IS, value.detach().cpu()
    if type(value) not in NUMBERS:
        refuse(
            f"an optimizer's state holds a {type(value).__name__}, which checkpoints cannot hold",
            where=where,
            needed="tensors, and numbers of the types int and float",
            remedy="Keep it in the parameter group: options may be text, None, and lists too.",
        )
    return NUMBER, torch.tensor(value, dtype=NUMBERS[type(value)])


def _merged(of_all: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The first rank's that has anything."""
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in of_all:
        for name, kinds in of_rank.items():
            if kinds:
                merged.setdefault(name, kinds)
    return merged


class OwnState:
    """Where it goes: what this rank keeps of it, and all of what is frozen."""

    def __init__(self, session: Session, tensors: Mapping[str, Tensor], names: Mapping[int, str]):
        self._session = session
        self._names = names
        self._of: dict[str, dict[str, Tensor]] = {}  # by parameter, and by the state's name for it
        for name, entry in tensors.items():
            parameter, colon, key = name.rpartition(": ")
            if colon and entry.role in OWN:
                self._of.setdefault(parameter, {})[key] = entry
        self._values: State = {}

    def aside(self) -> State:
        """Memory for what is frozen, which targets() fills."""
        for _, parameter in self._session.parameters():
            if not parameter.requires_grad:
                self._make(parameter, parameter.shape)
        return dict(self._values)

    def targets(self, partition: Partition) -> list[Target]:
        begins = {}
        for member in partition.members:
            first, count = partition.part(member)
            if count > 0:
                begins[id(member.parameter)] = first
                self._make(member.parameter, shape_of(member, count))
        targets: list[Target] = []
        for key, values in self._values.items():
            name = self._names[key]
            for kind, value in values.items():
                entry = self._of[name][kind]
                first = begins.get(key, 0) if entry.role == BY_ELEMENT else 0
                targets.append(PlainTensor(moment_name(name, kind), entry, value, first))
        return targets

    def _make(self, parameter: torch.nn.Parameter, shape: torch.Size) -> None:
        entries = self._of.get(self._names[id(parameter)], {})
        if entries:
            self._values[id(parameter)] = {
                key: torch.empty(
                    shape if entry.role == BY_ELEMENT else entry.shape, dtype=getattr(torch, entry.dtype)
                )
                for key, entry in entries.items()
            }

    def give(self) -> None:
        """To the optimizer, once it is read."""
        for _, parameter in self._session.parameters():
            values = self._values.get(id(parameter))
            if values is None:
                continue
            entries = self._of[self._names[id(parameter)]]
            for key, value in values.items():
                if entries[key].role == NUMBER:
                    values[key] = value.item()
            self._session.optimizer.state[parameter] = values
