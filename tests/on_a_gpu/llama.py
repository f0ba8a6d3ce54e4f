"""A decoder like Llama, in plain torch, and its configurations for the planner."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional


def config(width: int, inner: int, layers: int, heads: tuple[int, int], words: int) -> dict:
    """Return a configuration as transformers has it. `heads` are those of queries, and those of keys and values."""
    return {
        "model_type": "llama",
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


CONFIGS = {
    "small": config(64, 160, 3, (4, 2), 500),
    "1b": config(2048, 5632, 20, (16, 16), 32000),
    "8b": config(4096, 14336, 32, (32, 8), 128256),  # Llama 3.1
    "14b": config(5120, 13824, 48, (40, 8), 152064),  # Qwen2.5, without biases
    "32b": config(5120, 27648, 64, (40, 8), 152064),
}


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return queries or keys (batch, heads, sequence, width), rotated by their position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: tuple[int, int]):
        super().__init__()
        self.head = width // heads[0]
        self.groups = heads[0] // heads[1]
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, heads[1] * self.head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        keys, values = (each.repeat_interleave(self.groups, 1) for each in (rotated(keys), values))
        mixed = functional.scaled_dot_product_attention(rotated(queries), keys, values, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        width = config["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.self_attn = Attention(width, (config["num_attention_heads"], config["num_key_value_heads"]))
        self.mlp = Mlp(width, config["intermediate_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Return the loss of the next token. With a `chunk`, blocks are checkpointed, and logits are made for so many tokens."""

    def __init__(self, config: dict, chunk: int | None = None):
        super().__init__()
        width, words = config["hidden_size"], config["vocab_size"]
        self.chunk = chunk
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, labels = self.embed_tokens(tokens[:, :-1]), tokens[:, 1:]
        for layer in self.layers:
            x = layer(x) if self.chunk is None else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        if self.chunk is None:
            return functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), labels.flatten())
        import ballast

        return ballast.chunked_loss(self.norm(x), self.lm_head, labels, chunk=self.chunk)


def made(config: dict, device: str, dtype: torch.dtype = torch.bfloat16, chunk: int | None = None) -> Llama:
    """Return the model, with the same initial values in each call, rounded to bf16 in each format."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config, chunk).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)
