"""Torch's parameters as units of the library, and their names: parameters of one unit are gathered, reduced and updated
together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from ballast import _core
from ballast.checks import refuse, refuse_unsupported
from ballast.formats import units_ahead
from ballast.torch.gpu import GPU, gpu_of_tensors
from ballast.torch.memory import BYTES, DTYPES, tensor_of
from ballast.torch.parameters.managed_parameter import has_foreign_class, is_opaque, kind_of
from ballast.torch.parts import parts_among_data

# Large enough that the fixed cost of a unit is small, and small enough that the first unit is reduced early in backward.
UNIT_ELEMENTS = 8 << 20

UNIT_DTYPES = {**DTYPES, BYTES: _core.DType.u8}


@dataclass(eq=False)
class UnitParameter:
    """A parameter with its place in a unit."""

    parameter: torch.nn.Parameter
    name: str
    group: int | None  # the number in the library's groups, see Groups; None: it is frozen
    missed: int = 0  # steps of the training that did not update it: before its first one, or without a gradient on all ranks
    counted: bool = True  # whether the norm of all gradients includes it
    number: int | None = None  # the place among the optimizer's parameters, in all units; None: it is not one of them
    blocks: Sequence[int] = ()  # rows of parts that the rule treats apart; none: it is one
    is_opaque: bool = False  # it is frozen, and another library knows what its bytes mean
    unit: int = 0
    tensor: int = 0  # number in the unit
    begin: int = 0  # first element in memory with the layout of the unit

    @property
    def parts(self) -> int:
        return parts_among_data(self.parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The format of the unit that the parameter is in."""
        return BYTES if self.is_opaque else self.parameter.dtype

    @property
    def width(self) -> int:
        """The elements of the unit for each element of the parameter."""
        return self.parameter.dtype.itemsize if self.is_opaque else 1

    @property
    def elements(self) -> int:
        """The elements of the unit that the parameter has."""
        return int(self.parameter.numel()) * self.width

    def parameter_range(self, first: int, count: int) -> tuple[int, int]:
        """Return a range of elements of the unit as one of the parameter. Shards begin and end between its elements."""
        return first // self.width, count // self.width


@dataclass
class ParameterUnit:
    dtype: torch.dtype
    members: list[UnitParameter] = field(default_factory=list)
    block: int | None = None  # in stage 3: units of several formats that one block has, or modules with the same parameters

    @property
    def parts(self) -> int:
        """The ranks with other data that have other parts of the unit."""
        return self.members[0].parts

    @property
    def elements(self) -> int:
        return sum(member.elements for member in self.members)

    @property
    def trained(self) -> list[UnitParameter]:
        return [member for member in self.members if member.group is not None]


def units_of(members: Iterable[UnitParameter]) -> list[ParameterUnit]:
    """Return units in the order of declaration, each of one number format and one number of parts."""
    units: list[ParameterUnit] = []
    open_units: dict[tuple[torch.dtype, int], ParameterUnit] = {}
    for member in members:
        unit = open_units.get((member.dtype, member.parts))
        if unit is None or unit.elements + member.elements > UNIT_ELEMENTS:
            unit = open_units[member.dtype, member.parts] = ParameterUnit(member.dtype)
            units.append(unit)
        unit.members.append(member)
    return numbered(units)


def numbered(units: list[ParameterUnit]) -> list[ParameterUnit]:
    """Set the unit of each member, and its number in the unit."""
    for number, unit in enumerate(units):
        for tensor, member in enumerate(unit.members):
            member.unit, member.tensor = number, tensor
    return units


def gpu_of(members: Iterable[UnitParameter]) -> int | None:
    return gpu_of_tensors(each.parameter for each in members)


def backward_order(units: Sequence[ParameterUnit]) -> list[int]:
    """Return the reverse order of declaration. The first backward pass shows the real order."""
    return [unit for unit in reversed(range(len(units))) if units[unit].trained]


def first_trace(units: Sequence[ParameterUnit], model: _core.Model, stage: int) -> list[_core.Visit]:
    """Return the order in which torch uses units, as far as their declaration shows it.

    A unit that is used out of order is gathered when it is needed. An order that comes twice in a row replaces this one.
    """
    in_backward, in_order = _core.Phase.backward, backward_order(units)
    if stage < 3:  # torch always sees all parameters, so the forward pass acquires no unit
        return [_core.Visit(unit, in_backward) for unit in in_order]
    first, last = min(in_order, default=len(units)), len(units) - 1
    visits = [visit for unit in range(len(units)) for visit in _core.visits(model, unit, _core.Phase.forward)]
    for unit in reversed(range(first, len(units))):
        if first < unit < last:  # the last one is still gathered, and the first one's input has no gradient
            visits += _core.visits(model, unit, _core.Phase.forward)
        if units[unit].trained:
            visits += _core.visits(model, unit, in_backward)
    return visits


def prefetched(units: Sequence[ParameterUnit], blocks: int) -> int:
    """Return how many units the library gathers ahead for so many blocks."""
    formats = Counter(unit.block for unit in units if unit.block is not None)
    return units_ahead(max(formats.values(), default=1), blocks)


class Groups:
    """The library's groups: the entries of param_groups that have parameters of the partition."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def number(self, place: int) -> int:
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place)

    def regroup(self, members: Sequence[UnitParameter], now: Mapping[int, int]) -> bool:
        """Change the entries of the groups if that is enough, and return whether it is. `now` has the entry of each parameter,
        by its id."""
        places: dict[int, int] = {}
        for member in members:
            place = now.get(id(member.parameter))
            if member.group is None or place is None or places.setdefault(member.group, place) != place:
                return False
        if len(members) != len(now):
            return False
        self.places = [places[number] for number in range(len(places))]
        return True


def model_of(units: Sequence[ParameterUnit]) -> _core.Model:
    return _core.Model(
        [
            _core.Unit(
                name,
                dtype=UNIT_DTYPES[unit.dtype],
                tensors=[
                    _core.Tensor(
                        member.name,
                        [member.elements] if member.is_opaque else list(member.parameter.shape),
                        group=member.group or 0,
                        frozen=member.group is None,
                        counted=member.counted,
                        number=member.number,
                        blocks=member.blocks,
                    )
                    for member in unit.members
                ],
                parts=unit.parts,
            )
            for name, unit in zip(unit_names(units), units)
        ]
    )


def unit_names(units: Sequence[ParameterUnit]) -> list[str]:
    """Return for each unit the name of the module with all of its parameters; else the names of the first and the
    last."""
    modules = [".".join(os.path.commonprefix([each.name.split(".")[:-1] for each in unit.members])) for unit in units]
    times, names = Counter(modules), []
    for module, unit in zip(modules, units):
        first, last = unit.members[0].name, unit.members[-1].name
        names.append(module if module and times[module] == 1 else first if first == last else f"{first} to {last}")
    return names


def views_in(memory: _core.Memory, members: Iterable[UnitParameter]) -> list[torch.Tensor]:
    """Return views of these members of one unit, in memory with the layout of the unit."""
    flat = ((each.parameter, tensor_of(memory, each.dtype, each.begin, each.elements)) for each in members)
    return [values.view(parameter.dtype).view(parameter.shape) for parameter, values in flat]


def names_of(groups: Sequence[Mapping[str, object]], model: torch.nn.Module | None) -> dict[int, str]:
    """Return names by id of the parameter: the model's names, else the place in the optimizer."""
    names = {id(parameter): name for name, parameter in named_parameters(model)} if model is not None else {}
    for number, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):  # type: ignore[arg-type, var-annotated]
            names.setdefault(id(parameter), f"param_groups[{number}].params[{i}]")
    return names


def require_known(parameter: torch.Tensor, name: str, *, trained: bool = True) -> None:
    """Refuse a parameter that cannot be partitioned."""
    kind, problem = kind_of(parameter), ""
    remedy = "" if trained else "A frozen parameter may have any format if its values are in its own memory."
    if trained and parameter.dtype not in DTYPES:
        problem = f"it holds {parameter.dtype}"
        remedy = "Cast the model: model.float(). Or train the parameter with another optimizer, which is not wrapped."
        if parameter.is_complex():
            remedy = "Make a parameter of torch.view_as_real() of it, and use torch.view_as_complex() of that parameter."
    elif parameter.layout != torch.strided:
        problem = f"its layout is {parameter.layout}"
    elif parameter.device.type not in ("cpu", GPU):
        problem = f"it is on the device {parameter.device}"
    elif has_foreign_class(parameter) and (trained or not _has_own_memory(parameter, kind)):
        problem = f"it is a {kind.__name__}"
    if problem:
        refuse_unsupported(
            f"cannot partition a parameter: {problem}",
            where=f"parameter {name}",
            needed="a dense torch.nn.Parameter of float32, bfloat16 or float16, on a CPU or a GPU",
            remedy=remedy,
        )


def _has_own_memory(parameter: torch.Tensor, kind: type) -> bool:
    """Return whether the values are in the memory of the parameter itself, and not in tensors that it wraps."""
    wraps = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return not wraps and not torch.nn.parameter.is_lazy(parameter)


def units_of_model(
    model: torch.nn.Module, trained: Iterable[UnitParameter], kinds: Iterable[str], keeps: Callable[[torch.Tensor], bool]
) -> list[ParameterUnit]:
    """Return units of all parameters of the model that `keeps` accepts. Those that are not trained are frozen."""
    by_id = {id(member.parameter): member for member in trained}
    members = []
    for name, parameter in named_parameters(model):
        if not keeps(parameter):
            continue
        member = by_id.get(id(parameter))
        require_known(parameter, name, trained=member is not None)
        members.append(member or UnitParameter(parameter, name, None, is_opaque=is_opaque(parameter)))
    return units_of_modules(model, members, kinds)


def outside_of(units: Iterable[ParameterUnit], members: Iterable[UnitParameter]) -> set[int]:
    """Return the ids of parameters that no module of the model has: no call of a module would gather them."""
    there = {id(member) for unit in units for member in unit.members}
    return {id(member.parameter) for member in members if id(member) not in there}


def refuse_outside(name: str) -> NoReturn:
    refuse(
        "cannot train a parameter: no module of the model had it when stage 3 partitioned the others by modules",
        where=f"parameter {name}",
        needed="a model that has it; or stage=2",
    )


def units_of_modules(model: torch.nn.Module, members: Sequence[UnitParameter], kinds: Iterable[str]) -> list[ParameterUnit]:
    """Return one unit for each block, and one for each other module with parameters of its own, in order of
    declaration. Other parameters of the model than these members are left out.

    Modules that share a parameter are one unit. `kinds` are the class names of blocks; without them repeated blocks are
    found.
    """
    blocks = named_blocks(model, set(kinds)) or repeated_blocks(model)
    by_id = {id(member.parameter): member for member in members}
    owners: dict[int, int] = {}  # parameter to unit
    merged: list[list[UnitParameter]] = []
    for module in [*blocks, *(each for each in model.modules())]:
        own = module.parameters() if module in blocks else module.parameters(recurse=False)
        _add([by_id[id(parameter)] for parameter in own if id(parameter) in by_id], owners, merged)
    units = [unit for block, group in enumerate(merged) for unit in _by_kind(group, block)]
    position = {id(member): number for number, member in enumerate(members)}
    units.sort(key=lambda unit: position[id(unit.members[0])])
    return numbered(units)


def _add(members: list[UnitParameter], owners: dict[int, int], merged: list[list[UnitParameter]]) -> None:
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


def _by_kind(members: list[UnitParameter], block: int) -> list[ParameterUnit]:
    units: dict[tuple[torch.dtype, int], ParameterUnit] = {}
    for member in members:
        units.setdefault((member.dtype, member.parts), ParameterUnit(member.dtype, block=block)).members.append(member)
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


# --- Names of tensors, with and without the wrappers of torch around a model or parts of it ---

COMPILED = "_orig_mod"  # the name that torch.compile() gives to the original module inside its own
PARALLEL = "module"  # the name that DistributedDataParallel gives


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself. Compiled parts of it stay as they are.

    >>> model = torch.nn.Linear(2, 1)
    >>> unwrapped(torch.compile(model)) is model
    True
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), torch.nn.Module):
            model = inner
        else:
            return model


def unwrapped_name(name: str) -> str:
    """Return a tensor's name without the names of wrappers.

    >>> unwrapped_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    if COMPILED not in name:
        return name
    return ".".join(word for word in name.split(".") if word != COMPILED)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in unwrapped(model).named_parameters():
        yield unwrapped_name(name), parameter


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in unwrapped(model).named_buffers():
        yield unwrapped_name(name), buffer


def required(model: torch.nn.Module | None, what: str, option: str = "") -> torch.nn.Module:
    """Return the model. Refuse to do `what` without it."""
    if model is None:
        refuse(f"cannot {what}", needed=f"ballast.wrap(optimizer, model{', ' if option else ''}{option})")
    return model


def places_in(model: torch.nn.Module | None) -> Iterator[tuple[torch.nn.Module, str, str, torch.Tensor]]:
    """Yield each module with the name of a parameter in it, the name in the model, and the tensor that is there."""
    for path, module in () if model is None else model.named_modules():
        for name, each in module._parameters.items():
            if each is not None:
                yield module, name, f"{path}.{name}" if path else name, each


def names_in_model(saved: Collection[str], known: Container[str]) -> dict[str, str]:
    """Return the model's own name of each saved tensor. They differ if it was saved from inside a wrapper.

    The name of a tensor's state begins with the tensor's name.

    >>> names_in_model(["module.weight", "module._orig_mod.bias: exp_avg", "cells"], {"weight", "bias"})
    {'module.weight': 'weight', 'module._orig_mod.bias: exp_avg': 'bias: exp_avg', 'cells': 'cells'}
    """
    names = {}
    for name in saved:
        tensor, colon, state = name.partition(": ")
        bare = unwrapped_name(tensor)
        own = next((each for each in (tensor, bare, bare.removeprefix(f"{PARALLEL}.")) if each in known), tensor)
        own += colon + state
        names[name] = name if own in saved else own  # no name replaces another
    return names
