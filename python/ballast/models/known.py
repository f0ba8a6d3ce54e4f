"""The configurations of a few models by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _llama(layers: int, hidden: int, heads: int, intermediate: int) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": 128256,
    }


def _gpt2(layers: int, width: int, heads: int) -> Mapping[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-8b": _llama(32, 4096, 32, 14336),
    "llama-70b": _llama(80, 8192, 64, 28672),
    "llama-405b": _llama(126, 16384, 128, 53248),
}


def known_name(model: str) -> str:
    """Return the name of a known model in any case, or else the same text. A file of that name comes first.

    >>> known_name("Llama-8B"), known_name("Llama-9B")
    ('llama-8b', 'Llama-9B')
    """
    lower = model.lower()
    return lower if lower in KNOWN and not Path(model).exists() else model
