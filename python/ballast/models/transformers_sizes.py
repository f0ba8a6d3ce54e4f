"""Count the attention of a model of transformers, and estimate its activations, from its modules and its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ballast.models.block import Block, attention_elements, mlp_elements
from ballast.models.description import Activations, Attention
from ballast.models.experts import experts_of, first_size
from ballast.models.modules import NO_ATTENTION, Part

if TYPE_CHECKING:
    import torch

OUTPUTS = ("o_proj", "out_proj", "dense", "proj", "o")  # names of the last projection of an attention
QUERIES = ("q_proj", "query", "q", "q_lin")
# Names of layers that say what a block keeps, and of sizes in configurations.
FUSED = ("query_key_value", "qkv_proj")
GATES = ("gate_proj", "gate_up_proj", "wi_1", "w3", "Wi")
HEAD_NORMS = ("q_norm",)
MORE_NORMS = ("pre_feedforward_layernorm",)  # in front of the attention and of the MLP, and after both
RMS_NORMS = ("RMSNorm", "T5LayerNorm")
INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
ACTIVATIONS = ("dense_act_fn", "hidden_act", "hidden_activation", "activation_function")
SEVERAL_INPUTS = "the time is counted as if each token passed through all parts of the model"
ONLY_TEXT = "the activations of the language model are counted, those of other parts are not"


def attention_of(part: Part, *, decodes: bool) -> Attention | None:
    """Return the flops of one token's attention in a part; None where an attention cannot be read. `decodes` says whether
    an attention that does not say so is causal."""
    found = [_attention(module, decodes=decodes) for module in _innermost(part.modules())]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    if len({each[1:] for each in known}) == 1:
        return known[0]._replace(flops=sum(each.flops for each in known))
    # An attention with itself and one with the encoder: none of them has a window.
    return Attention(sum(each.flops / 2 if each.causal else each.flops for each in known))


def _innermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    named = [module for module in modules if "Attention" in type(module).__name__]
    return [module for module in named if not any("Attention" in type(below).__name__ for below in list(module.modules())[1:])]


def _attention(module: Any, *, decodes: bool) -> Attention | None:
    """Return two products, of queries with keys and of scores with values."""
    values, query = _size_of(module, OUTPUTS, "in_features"), _size_of(module, QUERIES, "out_features")
    head = getattr(module, "qk_head_dim", None)  # of latent attention, whose values have another width
    keys = head * module.num_heads if head else values or query
    if keys is None:
        return None
    causal = getattr(module, "is_causal", decodes)
    return Attention(2.0 * (keys + (values or keys)), _window(module), causal=bool(causal))


def _window(module: Any) -> int:
    """Return the window of an attention, 0 for none. Modules without an attribute for it use that of their configuration."""
    config = getattr(module, "config", None)
    is_used = getattr(config, "use_sliding_window", True)
    return getattr(module if hasattr(module, "sliding_window") else config, "sliding_window", None) or 0 if is_used else 0


def _size_of(module: Any, names: Iterable[str], size: str) -> int | None:
    """Return a size of the first of these layers that the module has."""
    sizes = (getattr(getattr(module, name, None), size, None) for name in names)
    return next((found for found in sizes if isinstance(found, int)), None)


def activations_of(module: Any, *, element: int) -> Activations | None:
    """Return the sizes of activations of a model of transformers, with so many bytes for each element; None where its
    configuration does not name them."""
    config = module.config
    text = config.get_text_config()
    stacks = ("encoder_layers", "decoder_layers") if config.is_encoder_decoder else ("num_hidden_layers",)
    layers = [getattr(text, name, None) or 0 for name in stacks]
    if config.is_encoder_decoder and 0 in layers:  # T5 names them otherwise
        layers = [text.num_hidden_layers, getattr(text, "num_decoder_layers", None) or text.num_hidden_layers]
    hidden = getattr(text, "hidden_size", None)
    if not hidden or not all(layers):
        return None
    # Many configurations have a vocabulary or labels, and the model has no head that turns them into logits.
    vocabulary = 0 if module.get_output_embeddings() is None else getattr(text, "vocab_size", None) or 0
    return Activations(sum(layers), hidden, vocabulary, _block(module, text, hidden).kept_bytes(element), element)


def _block(module: Any, text: Any, hidden: int) -> Block:
    """Return what a block keeps: its widths are those of the configuration, its kinds of layers those of the modules."""
    below = list(module.modules())
    heads = first_size(text, ("num_attention_heads",)) or 1
    width = first_size(text, ("qk_head_dim", "head_dim")) or hidden // heads
    queries, keys = heads * width, width * (first_size(text, ("num_key_value_heads",)) or heads)
    fused = next((size for each in below if (size := _size_of(each, FUSED, "out_features"))), None)
    if fused:
        keys = (fused - queries) // 2
    return Block(
        norms=hidden * (4 if _has(below, MORE_NORMS) else 2),
        attention=attention_elements(queries, keys, is_fused=bool(fused) and hasattr(text, "rope_parameters")),
        mlp=_mlp_elements(text, hidden, is_gated=_has(below, GATES)),
        head_norms=queries + keys if _has(below, HEAD_NORMS) else 0,
        has_rms_norms=any(kind in type(each).__name__ for each in below for kind in RMS_NORMS),
    )


def _mlp_elements(text: Any, hidden: int, *, is_gated: bool) -> int:
    """Return what an MLP keeps. Each expert that a token passes through also keeps its own input and result."""
    activation = next((getattr(text, name) for name in ACTIVATIONS if hasattr(text, name)), None)
    experts = experts_of(text)
    if experts is None:
        return mlp_elements(first_size(text, INNER) or 4 * hidden, activation, is_gated=is_gated)
    widths = experts.chosen * experts.width + experts.shared_width
    return 2 * experts.chosen * hidden + mlp_elements(widths, activation, is_gated=True)


def _has(modules: Iterable[torch.nn.Module], names: Iterable[str]) -> bool:
    """Return whether one of the modules has a layer or a parameter with one of these names."""
    return any(getattr(module, name, None) is not None for module in modules for name in names)


def notes_of(module: Any, *, attention_is_known: bool) -> list[str]:
    """Return what the time and the activations of a model of transformers leave out."""
    config = module.config
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    notes = [] if attention_is_known else [NO_ATTENTION]
    notes += [SEVERAL_INPUTS] if config.is_encoder_decoder or len(parts) > 1 else []
    return notes + ([ONLY_TEXT] if len(parts) > 1 else [])
