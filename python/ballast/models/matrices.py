"""Divide a model between Muon, for the matrices of blocks, and another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ballast import _core


class Part(NamedTuple):
    """Some tensors of a model, as a model of its own, and the places of its units in the whole one."""

    model: _core.Model
    places: Sequence[int]


class Divided(NamedTuple):
    """The two parts. A unit with tensors of both is in both. `others` is None where all tensors are matrices of blocks."""

    matrices: Part
    others: Part | None


def divide(model: _core.Model) -> Divided | None:
    """Return the two parts, or None for a model whose blocks have no matrices."""
    matrices = _part(model, is_hidden_matrix, lambda unit: False)
    others = _part(model, lambda unit, tensor: not is_hidden_matrix(unit, tensor), lambda unit: not unit.tensors)
    return Divided(matrices, others) if matrices else None


def is_hidden_matrix(unit: _core.Unit, tensor: _core.Tensor) -> bool:
    """Return whether Muon is used for a tensor: a trained matrix of a block.

    >>> block, head = (
    ...     _core.Unit(name, dtype=_core.DType.bf16, tensors=[_core.Tensor("w", [8, 4])]) for name in ("layers.0", "head")
    ... )
    >>> is_hidden_matrix(block, block.tensors[0]), is_hidden_matrix(head, head.tensors[0])
    (True, False)
    """
    return is_block(unit) and len(tensor.shape) == 2 and not tensor.frozen


def is_block(unit: _core.Unit) -> bool:
    """Return whether a unit is a repeated block, whose name ends with a number. Embeddings and heads are outside."""
    return unit.name.split(".")[-1].isdigit()


def _part(
    model: _core.Model, belongs: Callable[[_core.Unit, _core.Tensor], bool], is_whole: Callable[[_core.Unit], bool]
) -> Part | None:
    """Return the units that have such tensors, with them alone, and whole units: those that only use tensors of others."""
    kept = [[index for index, tensor in enumerate(unit.tensors) if belongs(unit, tensor)] for unit in model.units]
    places = [place for place, tensors in enumerate(kept) if tensors or is_whole(model.units[place])]
    units = []
    for unit, tensors in ((model.units[place], kept[place]) for place in places):
        ties = [
            _core.Tie(tie.name, unit=places.index(tie.unit), tensor=kept[tie.unit].index(tie.tensor))
            for tie in unit.ties
            if tie.tensor in kept[tie.unit]
        ]
        units.append(_core.Unit(unit.name, dtype=unit.dtype, tensors=[unit.tensors[each] for each in tensors], ties=ties))
    return Part(_core.Model(units), places) if units else None
