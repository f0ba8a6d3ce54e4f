"""The Llama trainer in C++ for tests: folders as of the Hugging Face Hub, files of tokens, and the sequences that it draws."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

BUILD = Path(os.environ.get("BALLAST_BUILD", Path(__file__).resolve().parents[2] / "build" / "release"))
PROGRAM = BUILD / "examples" / "llama" / "llama"

CONTEXT, BATCH, MICRO_STEPS, STEPS, SEED = 40, 3, 2, 10, 7
RATE, DECAY, MAX_NORM = 3e-3, 0.1, 0.7
SHAPE = dict(vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64, dtype="float32")
LLAMA_3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=10000.0)
CONFIGS = {
    "llama 3": LlamaConfig(**SHAPE, rope_parameters=LLAMA_3 | {"original_max_position_embeddings": 16}),
    "llama 2, tied": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "qwen 2.5": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen 3": Qwen3Config(**SHAPE, head_dim=16),
}


def make_model(config, folder: Path) -> torch.nn.Module:
    """Write a folder as of the Hub, with values that are not those of a fresh model, and return its model."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def write_tokens(path: Path, layout: str, count: int = 4000) -> numpy.ndarray:
    """Write tokens as nanoGPT, llm.c or llmq do."""
    tokens = numpy.random.default_rng(1).integers(0, SHAPE["vocab_size"], count)
    tokens[1::2] = (tokens[::2] * 7 + 3) % SHAPE["vocab_size"]  # half of them can be learned
    header = numpy.zeros(256, dtype=numpy.int32)
    if layout == "llm.c":
        header[:3] = 20240520, 1, count
    elif layout == "llmq":
        header[:2] = numpy.frombuffer(b"BIN.TOK\n", dtype=numpy.int32)
        header[2:6] = 2, 4, count, SHAPE["vocab_size"]
    width = numpy.uint32 if layout == "llmq" else numpy.uint16
    path.write_bytes((b"" if layout == "nanoGPT" else header.tobytes()) + tokens.astype(width).tobytes())
    return tokens


def command_of(folder: Path, tokens: Path, losses: Path, *more: object, steps: int = STEPS) -> list[str]:
    options = dict(context=CONTEXT, batch=BATCH, steps=steps, seed=SEED, chunk=33, losses=losses, threads=1)
    options |= {"micro-steps": MICRO_STEPS, "lr": RATE, "weight-decay": DECAY, "max-norm": MAX_NORM}
    command = [PROGRAM, folder / "model", tokens, *(f"--{name}={value}" for name, value in options.items()), *more]
    return [str(word) for word in command]


def train_ours(folder: Path, tokens: Path, losses: Path, *more: object, steps: int = STEPS) -> list[list[float]]:
    """Return loss and norm of each step that the program makes."""
    losses.unlink(missing_ok=True)
    ended = subprocess.run(command_of(folder, tokens, losses, *more, steps=steps), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lines = losses.read_text().splitlines() if losses.exists() else []  # none: no step was made
    return [[float.fromhex(number) for number in line.split()[1:]] for line in lines]


def noise(*numbers: int) -> int:
    """examples/llama/noise.h: which sequences the program draws."""
    x, mask = 0, 2**64 - 1
    for number in numbers:
        x = (x + number + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return x


def draw(tokens: numpy.ndarray, step: int, micro_step: int, rank: int) -> torch.Tensor:
    length, key = CONTEXT + 1, noise(SEED, step, micro_step, rank)
    begins = [noise(key, i) % (len(tokens) - length + 1) for i in range(BATCH)]
    return torch.tensor(numpy.stack([tokens[begin : begin + length] for begin in begins]))
