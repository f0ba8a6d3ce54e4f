"""A model as the planner needs it: its units, and the cost of a token in each. It may be divided between Muon, for the matrices
of blocks, and another optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ballast import _core
from ballast.checks import one_of, refuse

# Names of the longest sequence in configurations. Those of an encoder and of a decoder differ.
POSITIONS = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions")
MOST_ELEMENTS = 1 << 40  # the most that a tensor has

# The peak of transformers' own loss, which is computed in fp32: log-probabilities and two tensors of gradients.
BYTES_OF_LOGIT = 12

# A backward pass relative to its forward pass: a matrix has two products, for its input and for its weight. Fused attention has
# five where forward has two, because it computes the scores again.
OF_MATRICES, OF_ATTENTION = 2.0, 2.5

# What blocks keep until backward: the input, the results of products and of attention, or all that autograd saves. Of the
# bytes in a block, about this part are results of products: of 0.43 in Llama 3 to 0.36 in Qwen 3.
TREATMENTS = ("checkpointed", "selective", "kept")
KEPT_OF_PRODUCTS = 0.4

# Tensors of the inner width that activation functions keep: those that transformers writes in several operators keep more than
# the input and the result, which the last layer shares. ReLU needs its result alone.
INNER_TENSORS = {"gelu_new": 5, "relu": 1}
USUAL_INNER_TENSORS = 2


@dataclass(frozen=True)
class Activations:
    """The sizes of a transformer's activations for one token. Its attention keeps no matrix of scores."""

    layers: int
    hidden: int
    vocabulary: int  # logits of a token; 0 without a head
    block: int  # bytes that autograd keeps in a block
    element: int = 2  # bytes of an element, in which the parameters are

    def bytes(self, tokens: int, treatment: str, *, loss_chunk: int | None = None) -> int:
        """Estimate the peak: the saved bytes of all blocks, and what the largest step of backward needs. `treatment` is one
        of TREATMENTS. `loss_chunk`: as chunked_loss() has it; None: the logits of all tokens are there at once.

        >>> Activations(layers=2, hidden=8, vocabulary=0, block=272).bytes(1, "checkpointed")
        440
        """
        return tokens * self.layers * self._saved(treatment) + self._peak(tokens, treatment, loss_chunk)

    def offloaded(self, tokens: int, treatment: str, *, loss_chunk: int | None = None) -> tuple[int, int]:
        """Estimate the bytes that stay on the device where activations are offloaded, and those that leave it. The saved
        bytes of two blocks are on their way. The head stays.

        >>> Activations(layers=3, hidden=8, vocabulary=0, block=272).offloaded(1, "kept")
        (680, 816)
        """
        saved = self._saved(treatment)
        return 2 * tokens * saved + self._peak(tokens, treatment, loss_chunk), tokens * saved * self.layers

    def _saved(self, treatment: str) -> int:
        of_products = int(KEPT_OF_PRODUCTS * self.block)
        return {"kept": self.block, "selective": of_products, "checkpointed": self.element * self.hidden}[treatment]

    def _peak(self, tokens: int, treatment: str, loss_chunk: int | None) -> int:
        """Return the bytes of the head or of a block in backward: the head's are released before. The gradients in a block
        take half as much as what the block keeps, which checkpointing computes again. In chunks, the gradients of the head are
        summed in fp32."""
        gradients = self.block // 2
        head = BYTES_OF_LOGIT * self.vocabulary * min(tokens, loss_chunk or tokens)
        sums = 4 * self.vocabulary * self.hidden if loss_chunk else 0
        return max(head + sums, tokens * (gradients if treatment == "kept" else gradients + self.block))


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
    name: str
    model: _core.Model
    flops: Sequence[float]  # one token's forward pass by unit, without attention between tokens
    frozen_flops: Sequence[float] = ()  # the part of `flops` with parameters that have no gradients
    attention: Sequence[Attention] = field(default=())  # one for each unit
    activations: Activations | None = None
    longest: int | None = None  # sequence that the model takes, in tokens, where its configuration says so
    inactive: int = 0  # parameters of experts that a token does not pass through
    scripted: str | None = None  # a module that torch.jit has scripted or traced: it cannot wait for parameters
    formats: int = 1  # the most units that a block has, one for each format
    unpacked: Description | None = None  # the same units before frozen matrices become codes
    resident: int = 0  # bytes of the device that each rank has next to the plan's: scales of codes, and one unpacked matrix
    notes: Sequence[str] = ()  # what the description assumes or leaves out

    @property
    def unit_names(self) -> list[str]:
        return [unit.name for unit in self.model.units]

    @property
    def parameters(self) -> int:
        plain = self.unpacked or self
        return sum(tensor.elements for unit in plain.model.units for tensor in unit.tensors)

    @property
    def attends(self) -> bool:
        """Whether attention between tokens is counted."""
        return any(each.flops for each in self.attention)

    def flops_of_token(self, sequence: int) -> float:
        """Return the flops of a token's forward and backward pass, with its attention in a sequence of this length."""
        attention = sum(each.of(sequence) for each in self.attention)
        return (1 + OF_MATRICES) * sum(self.flops) + (1 + OF_ATTENTION) * attention

    def moved(self) -> list[float]:
        """Return the elements that operations between the matrices read and write in a token's forward pass, by unit: norms,
        activation functions, sums and the loss pass over the inputs and results of matrices, about once where they are fused.
        Of experts those count that the token passes through.

        >>> from_shapes({"h.0": {"up": (16, 4), "down": (4, 16)}, "embedding": {"weight": (32, 4)}}).moved()
        [40.0, 0.0]
        """
        units = (self.unpacked or self).model.units
        moved = []
        for unit, flops in zip(units, self.flops, strict=True):
            used = [tensor.shape for tensor in (*unit.tensors, *(units[tie.unit].tensors[tie.tensor] for tie in unit.ties))]
            matrices = [shape for shape in used if len(shape) > 1]
            width = sum(shape[0] * sum(shape[1:]) if len(shape) == 3 else sum(shape) for shape in matrices)
            moved.append(width * flops / (sum(map(matrix_flops, matrices)) or 1.0))
        return moved

    @property
    def active_parameters(self) -> int:
        """The parameters that a token passes through."""
        return self.parameters - self.inactive


def holds_experts(name: str) -> bool:
    """Return whether a parameter with this name belongs to the experts among which a router chooses.

    >>> holds_experts("layers.0.mlp.experts.down_proj"), holds_experts("layers.0.mlp.shared_experts.up_proj.weight")
    (True, False)
    """
    return "experts" in name.split(".")[:-1]


def with_divided_experts(description: Description, ranks: int) -> Description:
    """Return the description of a rank's part where so many ranks divide the experts of each unit, as units of their own.

    >>> described = from_shapes({"h.0": {"q": (4, 4), "mlp.experts.up": (8, 2, 4)}})
    >>> divided = with_divided_experts(described, 4)
    >>> [(unit.name, unit.parts, unit.tensors[0].shape) for unit in divided.model.units]
    [('h.0', 1, [4, 4]), ('h.0.experts', 4, [2, 2, 4])]
    >>> [*divided.flops] == [2 * 16, 2 * 64]
    True
    """
    units = description.model.units
    rest = [[i for i, each in enumerate(unit.tensors) if not holds_experts(each.name)] for unit in units]
    experts = [[each for each in unit.tensors if holds_experts(each.name)] for unit in units]
    _require_divisible(description.name, [each for of_unit in experts for each in of_unit], ranks)
    held = sum(each.elements for of_unit in experts for each in of_unit)
    active = 1.0 - description.inactive / held
    places = [number + sum(map(bool, experts[:number])) for number in range(len(units))]
    made: list[tuple[_core.Unit, float, float, Attention]] = []
    for number, (unit, own) in enumerate(zip(units, experts)):
        tensors, ties = unit.tensors, [(tie, rest[tie.unit].index(tie.tensor)) for tie in unit.ties]
        moved = [_core.Tie(tie.name, unit=places[tie.unit], tensor=tensor) for tie, tensor in ties]
        dense = _core.Unit(unit.name, dtype=unit.dtype, tensors=[tensors[each] for each in rest[number]], ties=moved)
        flops, frozen = (active * sum(matrix_flops(each.shape) for each in of) for of in (own, [e for e in own if e.frozen]))
        attention = description.attention[number] if description.attention else Attention(0.0)
        without = description.frozen_flops[number] if description.frozen_flops else 0.0
        made.append((dense, description.flops[number] - flops, without - frozen, attention))
        if own:
            local = [_core.Tensor(each.name, [each.shape[0] // ranks, *each.shape[1:]], frozen=each.frozen) for each in own]
            part = _core.Unit(f"{unit.name}.experts", dtype=unit.dtype, tensors=local, parts=ranks)
            made.append((part, flops, frozen, Attention(0.0)))
    parts, all_flops, all_frozen, all_attention = zip(*made)
    model = _core.Model([*parts])
    return replace(description, model=model, flops=all_flops, frozen_flops=all_frozen, attention=all_attention)


def _require_divisible(where: str, experts: Sequence[_core.Tensor], ranks: int) -> None:
    if not experts:
        refuse("cannot divide experts among ranks: the model has none", where=where, needed="a mixture of experts")
    for each in experts:
        if each.name.split(".")[-2] != "experts" or each.shape[0] % ranks:
            refuse(
                f"cannot divide experts among {ranks} ranks",
                where=f"{where}, {each.name} of shape {each.shape}",
                needed="all experts of a layer in one tensor, as transformers has them, and a number that the ranks can divide",
            )


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


@dataclass(frozen=True)
class Block:
    """The elements of a token that a block keeps. Linear layers that share an input keep it once."""

    norms: int  # the width of all norms over the hidden size
    attention: int  # queries, keys, values and the result
    mlp: int
    head_norms: int = 0  # the width of norms over heads
    has_rms_norms: bool = True  # False: LayerNorms

    def kept_bytes(self, element: int) -> int:
        """Return the bytes where an element of a result has `element` bytes. A LayerNorm keeps its input and its result. An
        RMSNorm computes in fp32: it keeps a copy of its input in it, the normalized input, and its result. The result of a
        norm over heads is not kept: rotary embeddings do not need it.

        >>> Block(norms=16, attention=20, mlp=112).kept_bytes(2)  # Llama 3 with a hidden size of 8: 49 bytes for each of them
        392
        """
        norm = 4 + 2 * element if self.has_rms_norms else 2 * element
        return norm * self.norms + (4 + element) * self.head_norms + element * (self.attention + self.mlp)


def attention_elements(queries: int, keys: int, *, is_fused: bool = False) -> int:
    """Return the elements that attention keeps. `is_fused` says that rotary embeddings change the queries and keys of one
    projection for all three: its whole result is kept for the values.

    >>> attention_elements(8, 2), attention_elements(8, 8, is_fused=True)
    (20, 48)
    """
    return 2 * (queries + keys) + (queries + keys if is_fused else 0)


def mlp_elements(inner: int, activation: object, *, is_gated: bool) -> int:
    """Return the elements that an MLP of this inner width keeps. A gated one also keeps both factors of its product.

    >>> mlp_elements(28, "silu", is_gated=True), mlp_elements(32, "gelu", is_gated=False)
    (112, 64)
    """
    tensors = INNER_TENSORS.get(str(activation), USUAL_INNER_TENSORS)
    return inner * (tensors + 2 if is_gated else tensors)


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
    """Return whether a unit is a repeated block, whose name ends with a number, or the experts of one. Embeddings and heads are
    outside."""
    return unit.parts > 1 or unit.name.split(".")[-1].isdigit()


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
        own = [unit.tensors[each] for each in tensors]
        units.append(_core.Unit(unit.name, dtype=unit.dtype, tensors=own, ties=ties, parts=unit.parts))
    return Part(_core.Model(units), places) if units else None
