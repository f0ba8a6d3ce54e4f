"""Count the attention of a model of transformers, and estimate its activations, from its modules and its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ballast.models.description import Activations, Attention
from ballast.models.experts import experts_of
from ballast.models.modules import NO_ATTENTION, Part

if TYPE_CHECKING:
    import torch

OUTPUTS = ("o_proj", "out_proj", "dense", "proj", "o")  # names of the last projection of an attention
QUERIES = ("q_proj", "query", "q", "q_lin")
SEVERAL_INPUTS = "the time is counted as if each token passed through all parts of the model"
ONLY_TEXT = "the activations of the language model are counted, those of other parts are not"


def attention_of(part: Part, *, decodes: bool) -> Attention | None:
    """Return the flops of one token's attention in a part; None where an attention cannot be read. `decodes` says whether
    an attention that does not say so is causal."""
    found = [_attention(module, decodes=decodes) for module in _innermost(part.modules())]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return Attention(sum(each.flops for each in known), max((each.window for each in known), default=0))


def _innermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    named = [module for module in modules if "Attention" in type(module).__name__]
    return [module for module in named if not any("Attention" in type(below).__name__ for below in list(module.modules())[1:])]


def _attention(module: Any, *, decodes: bool) -> Attention | None:
    """Return two products, of queries with keys and of scores with values. Half of each is masked where it is causal."""
    values, query = _size_of(module, OUTPUTS, "in_features"), _size_of(module, QUERIES, "out_features")
    head = getattr(module, "qk_head_dim", None)  # of latent attention, whose values have another width
    keys = head * module.num_heads if head else values or query
    if keys is None:
        return None
    causal = getattr(module, "is_causal", decodes)
    window = getattr(module, "sliding_window", None) or 0
    return Attention((1.0 if causal else 2.0) * (keys + (values or keys)), window)


def _size_of(module: Any, names: Iterable[str], size: str) -> int | None:
    """Return a size of the first of these layers that the module has."""
    sizes = (getattr(getattr(module, name, None), size, None) for name in names)
    return next((found for found in sizes if isinstance(found, int)), None)


def activations_of(config: Any) -> Activations | None:
    """Return the sizes of activations of a configuration of transformers; None where it does not name them."""
    text = config.get_text_config()
    stacks = ("encoder_layers", "decoder_layers") if config.is_encoder_decoder else ("num_hidden_layers",)
    layers = [getattr(text, name, None) or 0 for name in stacks]
    if config.is_encoder_decoder and 0 in layers:  # T5 names them otherwise
        layers = [text.num_hidden_layers, getattr(text, "num_decoder_layers", None) or text.num_hidden_layers]
    hidden = getattr(text, "hidden_size", None)
    if not hidden or not all(layers):
        return None
    # Many configurations of images have the labels of a classifier, and none has a vocabulary.
    vocabulary = getattr(text, "vocab_size", None) or 0
    return Activations(sum(layers), hidden, vocabulary, block=_bytes_of_block(text, hidden))


def _bytes_of_block(text: Any, hidden: int) -> int | None:
    """Return the bytes of a token in a block with experts, or None for a block without. Of the 34 bytes for each hidden
    element of a usual block, 18 remain; each expert keeps its input, its output and four inner results in two bytes."""
    experts = experts_of(text)
    if experts is None:
        return None
    return 18 * hidden + experts.chosen * (4 * hidden + 8 * experts.width) + 8 * experts.shared_width


def notes_of(module: Any, *, attention_is_known: bool) -> list[str]:
    """Return what the time and the activations of a model of transformers leave out."""
    config = module.config
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    notes = [] if attention_is_known else [NO_ATTENTION]
    notes += [SEVERAL_INPUTS] if config.is_encoder_decoder or len(parts) > 1 else []
    return notes + ([ONLY_TEXT] if len(parts) > 1 else [])
