"""Group the parameters of a model into units, which are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch

from ballast.checks import refuse
from ballast.wrapper.units import Member, UnitOfMembers, is_opaque, numbered, require_known
from ballast.wrapper.unwrap import named_parameters


def units_of_model(
    model: torch.nn.Module, trained: Iterable[Member], kinds: Iterable[str], keeps: Callable[[torch.Tensor], bool]
) -> list[UnitOfMembers]:
    """Return units of all parameters of the model that `keeps` accepts. Those that are not trained are frozen."""
    by_id = {id(member.parameter): member for member in trained}
    members = []
    for name, parameter in named_parameters(model):
        if not keeps(parameter):
            continue
        member = by_id.get(id(parameter))
        require_known(parameter, name, trained=member is not None)
        members.append(member or Member(parameter, name, None, is_opaque=is_opaque(parameter)))
    return units_of_modules(model, members, kinds)


def outside_of(units: Iterable[UnitOfMembers], members: Iterable[Member]) -> set[int]:
    """Return the ids of parameters that no module of the model has: no call of a module would gather them."""
    there = {id(member) for unit in units for member in unit.members}
    return {id(member.parameter) for member in members if id(member) not in there}


def refuse_outside(name: str) -> NoReturn:
    refuse(
        "cannot train a parameter: no module of the model had it when stage 3 partitioned the others by modules",
        where=f"parameter {name}",
        needed="a model that has it; or stage=2",
    )


def units_of_modules(
    model: torch.nn.Module, members: Sequence[Member], kinds: Iterable[str]
) -> list[UnitOfMembers]:
    """Return one unit for each block, and one for each other module with parameters of its own, in order of
    declaration. Other parameters of the model than these members are left out.

    Modules that share a parameter are one unit. `kinds` are the class names of blocks; without them repeated blocks are
    found.
    """
    blocks = named_blocks(model, set(kinds)) or repeated_blocks(model)
    by_id = {id(member.parameter): member for member in members}
    owners: dict[int, int] = {}  # parameter to unit
    merged: list[list[Member]] = []
    for module in [*blocks, *(each for each in model.modules())]:
        own = module.parameters() if module in blocks else module.parameters(recurse=False)
        _add([by_id[id(parameter)] for parameter in own if id(parameter) in by_id], owners, merged)
    units = [unit for group in merged for unit in _by_dtype(group)]
    position = {id(member): number for number, member in enumerate(members)}
    units.sort(key=lambda unit: position[id(unit.members[0])])
    return numbered(units)


def _add(members: list[Member], owners: dict[int, int], merged: list[list[Member]]) -> None:
    known = sorted({owners[id(member.parameter)] for member in members if id(member.parameter) in owners})
    new = [member for member in members if id(member.parameter) not in owners]
    if not new and len(known) < 2:
        return
    target = known[0] if known else len(merged)
    if not known:
        merged.append([])
    for other in known[1:]:
        new += merged[other]
        merged[other] = []
    merged[target] += new
    for member in new:
        owners[id(member.parameter)] = target


def _by_dtype(members: list[Member]) -> list[UnitOfMembers]:
    units: dict[torch.dtype, UnitOfMembers] = {}
    for member in members:
        units.setdefault(member.dtype, UnitOfMembers(member.dtype)).members.append(member)
    return list(units.values())


def named_blocks(model: torch.nn.Module, kinds: set[str]) -> list[torch.nn.Module]:
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    missing = kinds - {type(module).__name__ for module in blocks}
    if missing:
        refuse(f"no module is a {missing.pop()}", where="units", needed="names of classes of the model's modules")
    return blocks


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of the outermost lists whose modules have one class."""
    blocks: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        children = list(module.children())
        is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        if is_list and len(children) > 1 and len({type(child) for child in children}) == 1:
            blocks.extend(child for child in children if any(True for _ in child.parameters()))
            return
        for child in children:
            visit(child)

    visit(model)
    return blocks
