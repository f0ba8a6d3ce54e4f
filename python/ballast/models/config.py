"""Models given as the configuration that Hugging Face keeps beside weights; of the kinds of Llama and of GPT-2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checks import one_of, refuse
from ballast.models.description import Activations, Description, dtype_named, matrix_flops
from ballast.models.known import KNOWN

Shapes = dict[str, list[int]]


@dataclass(frozen=True)
class Transformer:
    """A decoder: a table of words, equal blocks, and a last layer."""

    embedding: Shapes
    block: Shapes
    last: Shapes  # in front of the last layer
    layers: int
    hidden: int
    vocabulary: int
    head_width: int  # of all heads together
    tied: bool


def read_config(place: str) -> Mapping[str, Any]:
    """A config.json, or the folder that has one."""
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        if "/" not in place and not place.endswith(".json"):
            one_of("known model", place, KNOWN)
        refuse(f"{path} does not exist", needed=f"a config.json, its folder, or one of {', '.join(KNOWN)}")
    try:
        config = json.loads(path.read_text())
    except ValueError as problem:
        refuse(f"{path} is not JSON", where=str(problem))
    if not isinstance(config, dict):
        refuse(f"{path} is not a configuration", needed="a JSON object with hidden_size and the like")
    return config


def from_config(config: Mapping[str, Any], *, name: str = "model", dtype: str | None = None) -> Description:
    """A configuration as units: embedding, blocks, norm, head.

    >>> from_config({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 4, "vocab_size": 16},
    ...             name="small").unit_names
    ['embedding', 'layers.0', 'layers.1', 'norm', 'head']
    """
    shape = _gpt2(config) if "n_embd" in config else _llama(config)
    kind = dtype_named(dtype or str(config.get("torch_dtype") or config.get("dtype") or "bf16"))

    def unit(name: str, shapes: Shapes, ties: list[_core.Tie] | None = None) -> _core.Unit:
        return _core.Unit(name, dtype=kind, tensors=[_core.Tensor(n, s) for n, s in shapes.items()], ties=ties or [])

    blocks = [unit(f"layers.{i}", shape.block) for i in range(shape.layers)]
    head = [shape.vocabulary, shape.hidden]
    tie = [_core.Tie("weight", unit=0, tensor=0)]
    last = unit("head", {}, tie) if shape.tied else unit("head", {"weight": head})
    units = [unit("embedding", shape.embedding), *blocks, unit("norm", shape.last), last]
    block_flops = sum(matrix_flops(s) for s in shape.block.values())
    return Description(
        name=name,
        model=_core.Model(units),
        flops=[0.0, *[block_flops] * shape.layers, 0.0, matrix_flops(head)],
        attention=[0.0, *[2.0 * shape.head_width] * shape.layers, 0.0, 0.0],  # two products, half of each is masked
        activations=Activations(shape.layers, shape.hidden, shape.vocabulary),
    )


def _number(config: Mapping[str, Any], key: str, default: object = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        refuse(f"{key} is {value!r} in the configuration", needed="a whole number from 1 on")
    return value


def _llama(config: Mapping[str, Any]) -> Transformer:
    if any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        refuse("the configuration is of a mixture of experts", remedy="Give its shapes by name instead.")
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    heads = _number(config, "num_attention_heads")
    width = _number(config, "head_dim", hidden // heads)
    keys = width * _number(config, "num_key_value_heads", heads)
    block = {
        "self_attn.q_proj.weight": [heads * width, hidden],
        "self_attn.k_proj.weight": [keys, hidden],
        "self_attn.v_proj.weight": [keys, hidden],
        "self_attn.o_proj.weight": [hidden, heads * width],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "mlp.down_proj.weight": [hidden, inner],
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
    }
    if config.get("attention_bias") or config.get("model_type") == "qwen2":
        block |= {"q_proj.bias": [heads * width], "k_proj.bias": [keys], "v_proj.bias": [keys]}
    vocabulary = _number(config, "vocab_size")
    return Transformer(
        embedding={"weight": [vocabulary, hidden]},
        block=block,
        last={"weight": [hidden]},
        layers=_number(config, "num_hidden_layers"),
        hidden=hidden,
        vocabulary=vocabulary,
        head_width=heads * width,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _gpt2(config: Mapping[str, Any]) -> Transformer:
    width, vocabulary = _number(config, "n_embd"), _number(config, "vocab_size")
    inner = _number(config, "n_inner", 4 * width)
    block = {
        "attn.c_attn.weight": [width, 3 * width],
        "attn.c_attn.bias": [3 * width],
        "attn.c_proj.weight": [width, width],
        "attn.c_proj.bias": [width],
        "mlp.c_fc.weight": [width, inner],
        "mlp.c_fc.bias": [inner],
        "mlp.c_proj.weight": [inner, width],
        "mlp.c_proj.bias": [width],
        **{f"{norm}.{part}": [width] for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
    }
    return Transformer(
        embedding={"wte.weight": [vocabulary, width], "wpe.weight": [_number(config, "n_positions"), width]},
        block=block,
        last={"weight": [width], "bias": [width]},
        layers=_number(config, "n_layer"),
        hidden=width,
        vocabulary=vocabulary,
        head_width=width,
        tied=bool(config.get("tie_word_embeddings", True)),
    )
