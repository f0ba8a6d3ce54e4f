"""A model as the planner needs it: its units, and the cost of a token in each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast import _core
from ballast.checks import one_of, refuse

# Names of the longest sequence in configurations. Those of an encoder and of a decoder differ.
POSITIONS = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions")
MOST_ELEMENTS = 1 << 40  # of a tensor
# At the peak of transformers' own loss, which is computed in fp32: log-probabilities and two tensors of gradients.
BYTES_OF_LOGIT = 12
# A backward pass relative to its forward pass: a matrix has two products, for its input and for its weight. Fused attention has
# five where forward has two, because it computes the scores again.
OF_MATRICES, OF_ATTENTION = 2.0, 2.5


@dataclass(frozen=True)
class Activations:
    """The sizes of a transformer's activations for one token. Its attention keeps no matrix of scores."""

    layers: int
    hidden: int
    vocabulary: int  # logits of a token; 0 without a head
    block: int  # bytes that autograd keeps in a block
    element: int = 2  # bytes of an element, in which the parameters are

    def bytes(self, tokens: int, *, checkpointed: bool) -> int:
        """Estimate the peak: the saved bytes of all blocks, and what the largest step of backward needs.

        >>> Activations(layers=2, hidden=8, vocabulary=0, block=272).bytes(1, checkpointed=True)
        440
        """
        return tokens * (self.layers * self._saved(checkpointed) + self._peak(checkpointed))

    def offloaded(self, tokens: int, *, checkpointed: bool) -> tuple[int, int]:
        """Estimate the bytes that stay on the device where activations are offloaded, and those that leave it. The saved
        bytes of two blocks are on their way. The head stays.

        >>> Activations(layers=3, hidden=8, vocabulary=0, block=272).offloaded(1, checkpointed=False)
        (680, 816)
        """
        saved = self._saved(checkpointed)
        return tokens * (2 * saved + self._peak(checkpointed)), tokens * saved * self.layers

    def _saved(self, checkpointed: bool) -> int:
        return self.element * self.hidden if checkpointed else self.block

    def _peak(self, checkpointed: bool) -> int:
        """Return the bytes of the head or of a block in backward: the head's are released before. The gradients in a block
        take half as much as what the block keeps, which checkpointing computes again."""
        gradients = self.block // 2
        return max(BYTES_OF_LOGIT * self.vocabulary, gradients + self.block if checkpointed else gradients)


class Attention(NamedTuple):
    """The flops of one token's forward pass for each token that it attends to."""

    flops: float
    window: int = 0  # tokens, in sliding-window attention; 0: the whole sequence
    causal: bool = False

    def of(self, sequence: int) -> float:
        """Return the flops of a token in a sequence, on average. In causal attention a token attends to those before it: to
        half of them on average, and to a full window where it is that far in.

        >>> Attention(2.0).of(64), Attention(2.0, causal=True).of(64)
        (128.0, 64.0)
        >>> Attention(2.0, window=128, causal=True).of(64), Attention(2.0, window=128, causal=True).of(4096)
        (64.0, 252.0)
        """
        seen = min(sequence, self.window or sequence)
        return self.flops * (seen - seen * seen / (2 * sequence) if self.causal else seen)


@dataclass(frozen=True)
class Description:
    """A model that `describe()` has read."""

    name: str
    model: _core.Model
    flops: Sequence[float]  # of one token's forward pass by unit, without attention between tokens
    frozen_flops: Sequence[float] = ()  # of `flops`, those with parameters that have no gradients
    attention: Sequence[Attention] = field(default=())  # by unit
    activations: Activations | None = None
    longest: int | None = None  # sequence that the model takes, in tokens, where its configuration says so
    inactive: int = 0  # parameters of experts that a token does not pass through
    notes: Sequence[str] = ()  # what the description assumes or leaves out

    @property
    def unit_names(self) -> list[str]:
        return [unit.name for unit in self.model.units]

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for unit in self.model.units for tensor in unit.tensors)

    @property
    def attends(self) -> bool:
        """Whether attention between tokens is counted."""
        return any(each.flops for each in self.attention)

    def flops_of_token(self, sequence: int) -> float:
        """Return the flops of a token's forward and backward pass, with its attention in a sequence of this length."""
        attention = sum(each.of(sequence) for each in self.attention)
        return (1 + OF_MATRICES) * sum(self.flops) + (1 + OF_ATTENTION) * attention

    @property
    def active_parameters(self) -> int:
        """The parameters that a token passes through."""
        return self.parameters - self.inactive


def longest_sequence(sizes: Mapping[str, object]) -> int | None:
    """Return the longest sequence that a model with these sizes takes, in tokens. Those of an image are its patches, and one
    for the class.

    >>> longest_sequence({"n_positions": 1024}), longest_sequence({"image_size": 224, "patch_size": 16}), longest_sequence({})
    (1024, 197, None)
    """
    found = [size for name in POSITIONS if isinstance(size := sizes.get(name), int) and size > 0]
    image, patch = sizes.get("image_size"), sizes.get("patch_size")
    if not found and isinstance(image, int) and isinstance(patch, int) and 0 < patch <= image:
        found = [(image // patch) ** 2 + 1]
    return max(found, default=None)


def bytes_of_element(kind: _core.DType) -> int:
    """Return the bytes of an element.

    >>> bytes_of_element(_core.DType.fp32), bytes_of_element(_core.DType.bf16)
    (4, 2)
    """
    return 4 if kind == _core.DType.fp32 else 2


def dtype_named(name: str) -> _core.DType:
    """Return the format of a name such as "bf16", or torch's "bfloat16".

    >>> dtype_named("bfloat16").name
    'bf16'
    """
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    short = names.get(name.removeprefix("torch."), name)
    return _core.DType[one_of("dtype", short, names.values())]


def possible(shape: Sequence[int], where: str) -> list[int]:
    """Return a shape of which a tensor can exist. Sums of the bytes of larger ones would overflow."""
    if math.prod(shape) > MOST_ELEMENTS:
        refuse(f"{list(shape)} is not the shape of a tensor", where=where, needed=f"at most {MOST_ELEMENTS:,} elements")
    return list(shape)


def matrix_flops(shape: Sequence[int]) -> float:
    """Return the flops of one token's forward pass through a weight: two for each element of a matrix.

    >>> matrix_flops((4, 8)), matrix_flops((8,))
    (64.0, 0.0)
    """
    if len(shape) < 2:
        return 0.0
    elements = 1.0
    for length in shape:
        elements *= length
    return 2.0 * elements
