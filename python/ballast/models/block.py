"""Count the bytes of a token that autograd keeps in a block of a transformer, with the operators of transformers."""

from __future__ import annotations

from dataclasses import dataclass

# Tensors of the inner width that activation functions keep: those that transformers writes in several operators keep more than
# the input and the result, which the last layer shares. ReLU needs its result alone.
INNER_TENSORS = {"gelu_new": 5, "relu": 1}
USUAL_INNER_TENSORS = 2


@dataclass(frozen=True)
class Block:
    """The elements of a token that a block keeps. Linear layers that share an input keep it once."""

    norms: int  # the width of all norms over the hidden size
    attention: int  # queries, keys, values and the result
    mlp: int
    head_norms: int = 0  # the width of norms over heads
    has_rms_norms: bool = True  # and no LayerNorm

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
