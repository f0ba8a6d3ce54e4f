"""Parameters that are DTensors. The training has the local tensor of each, as a plain parameter; modules see the DTensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from ballast._torch_compat import box_of_local_tensor, gradient_hooks_of, is_dtensor
from ballast.checks import refuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

ATTRIBUTE = "ballast_part"  # a local tensor has its Part here
IN_ITS_PLACE = "ballast_local"  # and a DTensor, that it was replaced by it: optimizers may still have the DTensor
Parts = tuple[tuple[str, "Part"], ...]  # by the names of a module's parameters


@dataclass(frozen=True)
class Part:
    """The place of a local tensor in the full one: a box of it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    among_data: int = 1  # ranks that have other parts and other data, as those of experts: they share no gradients

    @staticmethod
    def of(tensor: Any) -> Part:
        return Part(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor of a local tensor. The gradient of the local tensor has the same placements."""
        from torch.distributed.tensor import DTensor

        own = local.view_as(local)  # values that are elsewhere are brought for this operation
        return DTensor.from_local(own, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor. All ranks of the mesh call this together."""
        with torch.no_grad():
            return self.dtensor(local).full_tensor()

    def local_of(self, full: Any) -> torch.Tensor:
        """Return the local tensor of a full one, which may be a DTensor. All ranks of the mesh call this together."""
        if not is_dtensor(full):
            sizes, offsets = self._box
            for dim, (size, offset) in enumerate(zip(sizes, offsets)):
                full = full.narrow(dim, offset, size)
            local: torch.Tensor = full
            return local
        if (full.device_mesh, tuple(full.placements)) != (self.mesh, self.placements):
            full = full.redistribute(self.mesh, self.placements)
        return local_tensor(full)

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in self.mesh.mesh.flatten()]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one of those with this part."""
        place = self.mesh.get_coordinate() or ()
        return not any(at for at, placement in zip(place, self.placements) if placement.is_replicate())

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._box[0]

    @cached_property
    def _box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return box_of_local_tensor(self.shape, self.mesh, self.placements)

    def ranges(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield where consecutive elements of the local tensor are in the full one: the first element there, their number, and
        the first of them, counted from `first`."""
        sizes, offsets = self._box
        inner = max((dim for dim, size in enumerate(sizes) if size != self.shape[dim]), default=0)
        row = prod(sizes[inner:])  # the elements of a row of this dimension are one after the other in the full tensor
        steps = [prod(self.shape[dim + 1 :]) for dim in range(len(sizes))]
        corner = sum(offset * step for offset, step in zip(offsets, steps))
        for number in range(first // row, -(-(first + count) // row)) if count else ():
            begin, end = max(first, number * row), min(first + count, (number + 1) * row)
            at, left = corner + begin - number * row, number
            for dim in reversed(range(inner)):
                left, place = divmod(left, sizes[dim])
                at += place * steps[dim]
            yield at, end - begin, begin - first


def part_of(parameter: torch.Tensor) -> Part | None:
    """Return the part of a full tensor that a parameter is; None if it is full."""
    return Part.of(parameter) if is_dtensor(parameter) else getattr(parameter, ATTRIBUTE, None)


def parts_among_data(parameter: torch.Tensor) -> int:
    """Return how many ranks with other data have other parts of the parameter."""
    part = part_of(parameter)
    return 1 if part is None else part.among_data


def local_tensor(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.detach().to_local() if is_dtensor(parameter) else parameter
    return local


def full_shape(tensor: torch.Tensor) -> torch.Size:
    part = part_of(tensor)
    return tensor.shape if part is None else part.shape


Ranges = list[tuple[int, int, int]]


def full_ranges(part: Part | None, first: int, count: int) -> Ranges:
    """Return where elements of a parameter are in the full tensor, as Part.ranges() does."""
    return [(first, count, 0)] if part is None else [*part.ranges(first, count)]


# --- In the place of DTensors ---


def use_local_tensors(model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> ExitStack:
    """Put local tensors into the places of DTensors in a model and its optimizers, and return what undoes it."""
    modules = [*model.modules()] if model is not None else []
    found = {id(each): each for module in modules for each in module._parameters.values() if is_dtensor(each)}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = {id(each): each for group in groups for each in group["params"] if is_dtensor(each) and id(each) not in found}
    earlier = {key: there for key, each in given.items() if (there := getattr(each, IN_ITS_PLACE, None)) is not None}
    if outside := [each for key, each in given.items() if key not in earlier]:
        refuse(
            "cannot train a DTensor that no module of the model has: modules see the full tensor that it is a part of",
            where=f"a parameter of shape {tuple(outside[0].shape)}",
            needed="ballast.wrap(optimizer, model, mesh=...), with the model that has it",
        )
    names = {id(each): name for name, each in model.named_parameters()} if found and model is not None else {}
    undoing = ExitStack()
    local = earlier | {key: _local_parameter(each, names[key]) for key, each in found.items()}
    for key, each in found.items():
        setattr(each, IN_ITS_PLACE, local[key])
        undoing.callback(delattr, each, IN_ITS_PLACE)
    for module in modules if local else ():
        own = {name: local[id(each)] for name, each in module._parameters.items() if id(each) in local}
        if own:
            _show_dtensors(module, own, undoing)
    for group in groups if local else ():
        undoing.callback(group.__setitem__, "params", group["params"])
        group["params"] = [local.get(id(each), each) for each in group["params"]]
    for optimizer in optimizers if local else ():
        undoing.callback(optimizer.state.update, dict(optimizer.state))
        undoing.callback(optimizer.state.clear)
        for each in [each for each in optimizer.state if id(each) in local]:
            optimizer.state[local[id(each)]] = {
                name: value.to_local() if is_dtensor(value) else value for name, value in optimizer.state.pop(each).items()
            }
    return undoing


def _local_parameter(parameter: Any, name: str) -> torch.nn.Parameter:
    placements, where = parameter.placements, f"parameter {name}"
    if any(type(each).__name__ not in ("Shard", "Replicate") for each in placements):
        refuse(
            "cannot train a DTensor: its norm and its files are those of shards and copies",
            where=where,
            needed="the placements Shard and Replicate",
            available=f"the placements {', '.join(map(str, placements))}",
        )
    if parameter.device_mesh.get_coordinate() is None:
        refuse("cannot train a DTensor: this process is not in its mesh", where=where, needed="the ranks of its mesh only")
    if parameter._backward_hooks or gradient_hooks_of(parameter):
        refuse(
            "cannot train a DTensor that has hooks: its local tensor becomes the parameter, without them",
            where=where,
            needed="hooks of the model's parameters after ballast.wrap()",
        )
    local = torch.nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)
    setattr(local, ATTRIBUTE, Part.of(parameter))
    return local


def _show_dtensors(module: torch.nn.Module, own: dict[str, torch.nn.Parameter], undoing: ExitStack) -> None:
    """Let a module see DTensors, and have their local tensors as its parameters."""
    undoing.callback(module._parameters.update, {name: module._parameters[name] for name in own})
    undoing.callback(setattr, module, "__class__", type(module))
    parts = tuple((name, part) for name, each in own.items() if (part := part_of(each)) is not None)
    module._parameters.update(own)
    module.__class__ = cast("Any", _class_with)(type(module), parts)
    undoing.callback(module.register_state_dict_post_hook(partial(_give_dtensors, parts)).remove)
    undoing.callback(module.register_load_state_dict_pre_hook(partial(_take_local_tensors, parts)).remove)
    if not any(True for child in module.children() for _ in child.parameters()):  # else another unit may replace its values
        if "forward" in vars(module):
            undoing.callback(setattr, module, "forward", module.forward)
        else:
            undoing.callback(vars(module).pop, "forward")
        module.forward = partial(_forward_with_dtensors, module, module.forward, tuple(own))


@cache  # modules of one class with the same placements stay modules of one class
def _class_with(kind: type[torch.nn.Module], parts: Parts) -> type[torch.nn.Module]:
    """Return a subclass whose attributes of these names are DTensors."""

    def attribute(name: str, part: Part) -> property:
        def get(module: torch.nn.Module) -> Any:
            there = module._parameters[name]
            is_local = isinstance(there, torch.nn.Parameter) and not is_dtensor(there)
            return part.dtensor(there) if is_local else there

        return property(get)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__} | {name: attribute(name, part) for name, part in parts})


def _forward_with_dtensors(
    module: torch.nn.Module, forward: Callable[..., Any], names: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    """Call the forward of a module while its parameters are DTensors: frameworks look there, too."""
    own = {name: module._parameters[name] for name in names}
    module._parameters.update({name: getattr(module, name) for name in names})
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(own)


def _give_dtensors(parts: Parts, _module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, part in parts:
        local = state.get(prefix + name)
        if isinstance(local, torch.Tensor) and not is_dtensor(local) and tuple(local.shape) == part.local_shape:
            with torch.no_grad():
                state[prefix + name] = part.dtensor(local)


def _take_local_tensors(parts: Parts, _module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, part in parts:
        given = state.get(prefix + name)
        if isinstance(given, torch.Tensor) and given.shape == part.shape:
            state[prefix + name] = part.local_of(given)


# --- In the graph of autograd ---

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class SavedDTensor:
    """A DTensor that autograd saves, whose local tensor other hooks have packed."""

    local: Any
    part: Part


def packing_local_tensors(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    """Return hooks that let these ones pack the local tensors of DTensors."""

    def pack_local(tensor: Any) -> Any:
        if not is_dtensor(tensor):
            return pack(tensor)
        with torch.no_grad():
            return SavedDTensor(pack(tensor.to_local()), Part.of(tensor))

    def unpack_local(saved: Any) -> torch.Tensor:
        if type(saved) is not SavedDTensor:
            return unpack(saved)
        with torch.no_grad():
            return saved.part.dtensor(unpack(saved.local))

    return pack_local, unpack_local
