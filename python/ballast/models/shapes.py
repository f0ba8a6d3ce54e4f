"""Describe a model by the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ballast import _core
from ballast.checks import refuse
from ballast.models.description import Description, dtype_named, matrix_flops, possible


def from_shapes(shapes: Mapping[str, Any], *, dtype: str | None = None) -> Description:
    """Describe a mapping from names to shapes, or from units to such mappings.

    >>> described = from_shapes({"h.0": {"q": (4, 4), "k": (4, 4)}, "h.1": {"q": (4, 4)}})
    >>> described.unit_names, described.parameters
    (['h.0', 'h.1'], 48)
    """
    units: dict[str, dict[str, list[int]]] = {}
    for name, value in shapes.items():
        if isinstance(value, Mapping):
            units[name] = {tensor: _checked(shape, f"{name}.{tensor}") for tensor, shape in value.items()}
        else:
            unit, tensor = _unit_and_tensor(name)
            units.setdefault(unit, {})[tensor] = _checked(value, name)
    kind = dtype_named(dtype or "bf16")
    model = _core.Model(
        [
            _core.Unit(name, dtype=kind, tensors=[_core.Tensor(tensor, shape) for tensor, shape in tensors.items()])
            for name, tensors in units.items()
        ]
    )
    flops = [_flops(name, tensors) for name, tensors in units.items()]
    return Description(name="model", model=model, flops=flops)


def _unit_and_tensor(name: str) -> tuple[str, str]:
    """Split a name at its number, as blocks have one: "model.layers.3.mlp.up.weight" belongs to "model.layers.3"."""
    words = name.split(".")
    for i, word in enumerate(words[:-1]):
        if word.isdigit():
            return ".".join(words[: i + 1]), ".".join(words[i + 1 :])
    return ".".join(words[:-1]) or name, words[-1]


def _checked(shape: object, name: str) -> list[int]:
    if isinstance(shape, Sequence) and not isinstance(shape, str):
        lengths = [length for length in shape if type(length) is int and length >= 0]
        if len(lengths) == len(shape):
            return possible(lengths, name)
    refuse(f"{shape!r} is not a shape", where=name, needed="whole numbers from 0 on, such as (4096, 4096)")


def _flops(unit: str, tensors: Mapping[str, Sequence[int]]) -> float:
    looked_up = "emb" in unit or "wte" in unit or "wpe" in unit  # a table, not a product
    return 0.0 if looked_up else sum(matrix_flops(shape) for shape in tensors.values())
