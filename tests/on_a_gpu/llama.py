"""A decoder like Llama, in plain torch, and its configuration for the planner."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LARGE = CONFIG | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}  # Llama 2 of 7 billion parameters
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 32}
SMALL = CONFIG | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4}


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
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
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
        self.self_attn = Attention(width, config["num_attention_heads"])
        self.mlp = Mlp(width, config["intermediate_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Return the loss of the next token."""

    def __init__(self, config: dict):
        super().__init__()
        width, words = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def made(config: dict, device: str) -> Llama:
    """Return the model in bf16, with the same initial values in each call."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model
