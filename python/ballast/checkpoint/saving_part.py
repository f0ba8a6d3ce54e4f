"""What a rank saves of one optimizer: the local shards of its parameters with their state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ballast import _core
from ballast.checkpoint.contents import SavedOptimizer, Tensor
from ballast.checkpoint.inventory import entry_of_member, require_all_partitioned
from ballast.checks import refuse
from ballast.torch.training.checkpoint_access import CheckpointAccess

Visit = Callable[[_core.StatePart, str, tuple[int, int]], None]


class SavingPart:
    """The shards of one optimizer. All ranks call all methods together, except check()."""

    def __init__(self, access: CheckpointAccess):
        self.access = access
        self.partition = access.partition_now()
        self.partition.require_not_updated("cannot save the model")
        self._names: Mapping[int, str] = {}
        self._groups: list[dict[str, Any]] = []
        self.entries: dict[str, Tensor] = {}
        self._local: list[_core.StatePart] = []

    def check(self, names: Mapping[int, str]) -> None:
        """Refuse what cannot be saved on this rank. `names` are those of all parameters."""
        self.access.require_not_gathered("cannot save a checkpoint")
        self.partition.require_not_cast()
        require_all_partitioned(self.access, names)
        self._names = names
        self._groups = groups_of(self.access.optimizer, names)

    def look(self) -> None:
        """List the shards."""
        members = self.partition.all_members
        self.entries = {self._name_of(each.parameter): entry_of_member(each, self.partition, self.access) for each in members}
        self._local = [part for number, part in enumerate(self.partition.local_shards()) if self._writes(number)]

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def _writes(self, number: int) -> bool:
        """Return whether this rank writes this shard. In stage 0 all ranks keep all shards, so they take turns."""
        group = self.access.group
        return self.access.options.stage != 0 or number % group.size == group.rank

    def sizes(self) -> list[int]:
        """Return the bytes of each shard that this rank writes."""
        sizes = []
        for part in self._local:
            member = self.partition.member_of(part)
            _, count = member.of_parameter(part.first, part.count)
            sizes.append(self.entries[self._name_of(member.parameter)].chunk_bytes(count))
        return sizes

    def visit(self, visit: Visit) -> None:
        """Read the shards that this rank writes, each with its name and the range of its elements."""
        mine = {(part.unit, part.tensor, part.first) for part in self._local}

        def look(part: _core.StatePart) -> None:
            if (part.unit, part.tensor, part.first) in mine:
                member = self.partition.member_of(part)
                visit(part, self._name_of(member.parameter), member.of_parameter(part.first, part.count))

        self.partition.visit_shards(look)

    def saved(self) -> SavedOptimizer:
        access = self.access
        return SavedOptimizer(
            step=access.steps,
            skipped=access.skipped,
            optimizer=type(access.optimizer).__name__,
            moments={moment.name: name for moment, name in access.names_of_moments()},
            groups=self._groups,
            own_step=access.has_custom_step,
            outer_identity=access.outer_identity,
        )


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the parameter groups, with names instead of parameters."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: unwrapped(value) for key, value in group.items() if key != "params"}
        for key, value in options.items():
            where = f'param_groups[{number}]["{key}"]'
            needed = "numbers, text, None, lists of them, and dictionaries of them with text as keys"
            try:
                read = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                refuse(f"cannot save a parameter group: {error}", where=where, needed=needed)
            if not _is_read_as(value, read):
                refuse(f"cannot save a parameter group: {value!r} would be read as {read!r}", where=where, needed=needed)
        groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], "options": options})
    return groups


def _is_read_as(value: Any, read: Any) -> bool:
    """Return whether loading gives the value back: it makes a tuple of a list where the option is one."""
    is_nan = value != value
    return bool(is_nan or (list(value) if isinstance(value, tuple) else value) == read)


def unwrapped(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
