"""A model as planning needs it: its units, and what a token costs in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ballast import _core
from ballast.checks import one_of


@dataclass(frozen=True)
class Activations:
    """Elements for one token, of a transformer whose attention keeps no matrix of scores."""

    layers: int
    hidden: int
    vocabulary: int

    def bytes(self, tokens: int, *, checkpointed: bool) -> int:
        """An estimate: 34 bytes of a block for each token and hidden element; of the last layer logits and gradients.

        >>> Activations(layers=2, hidden=8, vocabulary=0).bytes(1, checkpointed=True)
        304
        """
        block = 34 * self.hidden
        blocks = 2 * self.hidden * self.layers + block if checkpointed else block * self.layers
        return tokens * (blocks + 6 * self.vocabulary)


@dataclass(frozen=True)
class Description:
    """Made by `describe()`."""

    name: str
    model: _core.Model
    flops: Sequence[float]  # of a token's forward pass, by unit, without attention
    attention: Sequence[float] = field(default=())  # and by unit what each token of the sequence adds
    activations: Activations | None = None
    notes: Sequence[str] = ()  # what the description assumes or leaves out

    @property
    def unit_names(self) -> list[str]:
        return [unit.name for unit in self.model.units]

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for unit in self.model.units for tensor in unit.tensors)


def dtype_named(name: str) -> _core.DType:
    """Of "bf16", or as torch says it, "bfloat16".

    >>> dtype_named("bfloat16").name
    'bf16'
    """
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    short = names.get(name.removeprefix("torch."), name)
    return _core.DType[one_of("dtype", short, names.values())]


def matrix_flops(shape: Sequence[int]) -> float:
    """Of a token's forward pass through a weight: a multiplication and an addition for each element of a matrix.

    >>> matrix_flops((4, 8)), matrix_flops((8,))
    (64.0, 0.0)
    """
    if len(shape) < 2:
        return 0.0
    elements = 1.0
    for length in shape:
        elements *= length
    return 2.0 * elements
