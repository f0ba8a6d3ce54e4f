"""A model with adapters (LoRA) over a frozen base, in the units that `wrap()` makes of PEFT's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ballast import _core
from ballast.checks import refuse
from ballast.models.description import Activations, Attention, Description, bytes_of_element, is_hidden_matrix, matrix_flops
from ballast.sizes import human_parameters

# Bytes of a frozen element of a matrix, and of its scales, which are no parameters: each rank keeps those. bitsandbytes has a
# scale in fp32 for 64 elements of nf4; matrices in fp8 have one for 128 x 128 elements.
PACKED: Mapping[str, tuple[float, float]] = {"nf4": (1 / 2, 4 / 64), "fp8": (1.0, 4 / 128**2)}
BASE_FORMATS = (*PACKED, "bf16")
ADAPTERS, BYTES_OF_ADAPTER = _core.DType.fp32, 4  # PEFT trains adapters in it


class Part(NamedTuple):
    """Tensors of a unit that have one format, and are trained or frozen together."""

    place: int  # of the unit in the plain model
    name: str
    dtype: _core.DType
    tensors: Sequence[_core.Tensor]

    @property
    def flops(self) -> float:
        return sum(matrix_flops(tensor.shape) for tensor in self.tensors)

    @property
    def is_trained(self) -> bool:
        return not all(tensor.frozen for tensor in self.tensors)


def with_adapters(plain: Description, rank: int, base_format: str | None) -> Description:
    """Return the model with frozen parameters, and with adapters on all matrices of its blocks, as PEFT adds them with
    `LoraConfig(rank, target_modules="all-linear")`. Matrices of blocks are packed where the format is one of codes.

    >>> from ballast.models.description import from_shapes
    >>> found = with_adapters(from_shapes({"h.0": {"up": (16, 4), "norm": (4,)}, "head": {"weight": (32, 4)}}), 2, "nf4")
    >>> [(unit.name, unit.dtype.name, [tensor.elements for tensor in unit.tensors]) for unit in found.model.units]
    [('h.0', 'u8', [32]), ('adapters.h.0', 'fp32', [8, 32]), ('others.h.0', 'bf16', [4]), ('head', 'bf16', [128])]
    >>> found.parameters, found.resident
    (236, 132)
    """
    before = plain.model.units
    frozen = next((unit.name for unit in before if any(tensor.frozen for tensor in unit.tensors)), None)
    if frozen is not None:
        what = "lora adds adapters and freezes all other parameters, and this model has frozen ones"
        refuse(what, where=f"unit {frozen}", needed="a model without adapters; or no lora: the model is planned as it is")
    parts = [part for place, unit in enumerate(before) for part in _parts(place, unit, rank, divides=base_format in PACKED)]
    whole = [sum(matrix_flops(tensor.shape) for tensor in unit.tensors) for unit in before]
    flops = [
        part.flops if part.is_trained else plain.flops[part.place] * (part.flops / whole[part.place] if part.flops else 1.0)
        for part in parts
    ]
    attends = [bool(plain.attention) and part.name == before[part.place].name for part in parts]
    found = replace(
        plain,
        model=_model(parts, before, codes=0.0),
        flops=flops,
        frozen_flops=[0.0 if part.is_trained else cost for part, cost in zip(parts, flops)],
        attention=[plain.attention[part.place] if own else Attention(0.0) for part, own in zip(parts, attends)],
        activations=plain.activations and _activations(plain.activations, parts),
        formats=max(Counter(part.place for part in parts).values()),
        notes=[*plain.notes, _note(parts, rank)],
    )
    if base_format is None or base_format not in PACKED:
        return found
    codes, scales = PACKED[base_format]
    matrices = [
        (tensor.elements, bytes_of_element(unit.dtype))
        for unit in before
        for tensor in unit.tensors
        if is_hidden_matrix(unit, tensor)
    ]
    unpacked = max((elements * element for elements, element in matrices), default=0)
    resident = int(scales * sum(elements for elements, _ in matrices)) + unpacked
    return replace(found, model=_model(parts, before, codes=codes), unpacked=found, resident=resident)


def _parts(place: int, unit: _core.Unit, rank: int, *, divides: bool) -> list[Part]:
    """Return the frozen tensors, which are divided where matrices are packed, and the adapters after the first of them."""
    tensors = [_core.Tensor(tensor.name, tensor.shape, frozen=True) for tensor in unit.tensors]
    matrices = {tensor.name for tensor in unit.tensors if is_hidden_matrix(unit, tensor)}
    packed = [tensor for tensor in tensors if not divides or not matrices or tensor.name in matrices]
    adapters = [
        _core.Tensor(f"{tensor.name}.{name}", shape)
        for tensor in tensors
        if tensor.name in matrices
        for name, shape in (("lora_A", [rank, tensor.shape[1]]), ("lora_B", [tensor.shape[0], rank]))
    ]
    parts = [Part(place, unit.name, unit.dtype, packed), Part(place, f"adapters.{unit.name}", ADAPTERS, adapters)]
    parts.append(Part(place, f"others.{unit.name}", unit.dtype, [tensor for tensor in tensors if tensor not in packed]))
    return [part for part in parts if part.tensors or part.name == unit.name]


def _model(parts: Sequence[Part], before: Sequence[_core.Unit], *, codes: float) -> _core.Model:
    """Return the units of the parts. `codes` are the bytes of an element of a packed matrix; 0: none is packed."""
    homes = {(part.place, t.name): (unit, i) for unit, part in enumerate(parts) for i, t in enumerate(part.tensors)}
    units = []
    for part in parts:
        unit = before[part.place]
        owners = [(tie.name, homes[tie.unit, before[tie.unit].tensors[tie.tensor].name]) for tie in unit.ties]
        ties = [_core.Tie(name, unit=owner, tensor=tensor) for name, (owner, tensor) in owners if part.name == unit.name]
        tensors, dtype = list(part.tensors), part.dtype
        if codes and part.name == unit.name and any(is_hidden_matrix(unit, tensor) for tensor in unit.tensors):
            tensors = [_core.Tensor(t.name, [math.ceil(codes * t.elements)], frozen=True) for t in tensors]
            dtype = _core.DType.u8
        units.append(_core.Unit(part.name, dtype=dtype, tensors=tensors, ties=ties))
    return _core.Model(units)


def _activations(plain: Activations, parts: Sequence[Part]) -> Activations:
    """Return the activations with the inputs of adapters, which PEFT casts, and what lies between their two matrices."""
    kept = (BYTES_OF_ADAPTER * sum(t.shape[1] for t in part.tensors) for part in parts if part.is_trained)
    return replace(plain, block=plain.block + max(kept, default=0))


def _note(parts: Sequence[Part], rank: int) -> str:
    trained = sum(tensor.elements for part in parts if part.is_trained for tensor in part.tensors)
    return f"adapters of rank {rank} on all matrices of blocks are trained, in fp32: {human_parameters(trained)} parameters"
