"""The model that all systems train: a small GPT in plain torch, or a model of transformers that is scaled to fit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ballast.checks import refuse
from ballast.models import describe
from ballast.models.config import without_quantization
from ballast.models.description import OF_ATTENTION
from ballast.models.known import KNOWN, is_config, read_model
from ballast.models.transformers import built, usual_class
from ballast.sizes import human_parameters
from ballast.tools.bench.cases import Workload

VOCABULARY = 4096
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
SIZES = {
    "width": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "keys": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
DENSE = "first_k_dense_replace"  # layers without experts, in front of those with them
NARROWEST = 64  # width of a model without heads
DECODERS = ("ForCausalLM", "LMHeadModel")
INNER = ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim")
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.heads = width // 64
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, width = x.shape
        heads = self.queries_keys_values(self.attention_norm(x)).view(sequences, length, 3, self.heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, context: int):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return _loss(self.head(self.norm(x)), tokens)


class LanguageModel(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _loss(self.model(input_ids=tokens, use_cache=False).logits, tokens)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def model_of(of: Workload, device: torch.device) -> nn.Module:
    """Build the model, with the same values on all ranks."""
    torch.manual_seed(0)
    torch.set_default_dtype(KINDS[of.dtype])
    try:
        with device:
            if of.config is None:
                return Gpt(of.layers, of.width, of.context)
            return LanguageModel(built(of.config, device=str(device))).to(KINDS[of.dtype])
    finally:
        torch.set_default_dtype(torch.float32)


def vocabulary_of(of: Workload) -> int:
    return VOCABULARY if of.config is None else int(of.config["vocab_size"])


def flops_of_token(of: Workload, model: nn.Module) -> float:
    """Return the flops of a token's forward and backward pass, as the planner counts them."""
    if of.config is None:
        attention = 2.0 * of.layers * of.width * of.context
        return describe(model).flops_of_token(of.context) + (1 + OF_ATTENTION) * attention
    return describe(of.config).flops_of_token(of.context)


def scaled(location: str, most: int) -> tuple[Mapping[str, Any], str]:
    """Return a configuration with at most this many parameters, and what was reduced. First there are fewer layers, then fewer
    words, then half of each width again and again."""
    given = without_quantization(KNOWN[location] if location in KNOWN else read_model(location))
    _require_decoder(given, location)
    config = dict(given)
    smaller = [_fewer_layers(config), {"vocab_size": min(config["vocab_size"], VOCABULARY)}]
    while describe(config).parameters > most:
        changes = smaller.pop(0) if smaller else _half(config)
        if not changes:
            refuse(f"cannot scale {location} to {human_parameters(most)} parameters", needed="a smaller model")
        config |= changes
        config |= _known_tokens(config)
    sizes = [*LAYERS, *chain(*SIZES.values()), *INNER, DENSE, "vocab_size"]
    changed = [key for key in sizes if key in config and config[key] != given[key]]
    return config, ", ".join(f"{key} {config[key]} of {given[key]}" for key in changed)


def _require_decoder(config: Mapping[str, Any], location: str) -> None:
    """Refuse what is not trained on tokens alone: models of several parts, and those of images or sound."""
    kinds = (config.get("architectures") or usual_class(str(config.get("model_type")))) if is_config(config) else []
    if not kinds or not str(kinds[0]).endswith(DECODERS) or not isinstance(config.get("vocab_size"), int):
        refuse(
            f"cannot train {location}" + (f": {kinds[0]} is no decoder of tokens alone" if kinds else ""),
            needed=f"the configuration of a language model, with a vocab_size, and of a class that ends with {DECODERS[0]}",
        )


def _known_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens, those that the vocabulary lacks replaced by its last one."""
    last = config["vocab_size"] - 1
    special = {key: value for key, value in config.items() if key.endswith("_token_id")}
    numbers = {key: min(value, last) for key, value in special.items() if isinstance(value, int)}
    return numbers | {key: [min(each, last) for each in value] for key, value in special.items() if isinstance(value, list)}


def _fewer_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return two layers, and their part of the lists that have an entry for each layer."""
    count = next((config[key] for key in LAYERS if isinstance(config.get(key), int)), 0)
    lists = {key: value[:2] for key, value in config.items() if isinstance(value, list) and len(value) == count > 2}
    dense = {DENSE: min(1, config[DENSE])} if isinstance(config.get(DENSE), int) else {}
    return lists | dense | {key: min(2, config[key]) for key in LAYERS if isinstance(config.get(key), int)}


def _half(config: Mapping[str, Any]) -> dict[str, int]:
    """Return half of each width, and nothing where the model has one head left. Heads keep their size, groups of them share
    keys, and there are experts enough for each token, and two in each group. A state space model has no heads."""
    names = {key: next((name for name in known if isinstance(config.get(name), int)), "") for key, known in SIZES.items()}
    width = config.get(names["width"], 0)
    heads = config[names["heads"]] if names["heads"] else width // NARROWEST
    if heads < 2:
        return {}
    half = heads // 2
    changes = {names["width"]: width // heads * half} | ({names["heads"]: half} if names["heads"] else {})
    changes |= {name: max(8, config[name] // 2) for name in INNER if isinstance(config.get(name), int)}
    if names["keys"]:
        most = max(1, config[names["keys"]] // 2)
        changes[names["keys"]] = next(count for count in range(most, 0, -1) if half % count == 0)
    if names["experts"]:
        fewest = max(config.get("num_experts_per_tok") or 1, 2 * (config.get("n_group") or 0))
        changes[names["experts"]] = max(fewest, config[names["experts"]] // 2)
    return changes
