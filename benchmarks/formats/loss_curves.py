#!/usr/bin/env python3
"""Compare the loss curves of a small transformer in each state format with those in format fp32.

    build/venv/bin/python benchmarks/formats/loss_curves.py

It needs torch (.ci/bootstrap venv torch) and build/release (or BALLAST_BUILD). The model learns the bytes of this repository's
own documents and sources; forward and backward run in bf16, as the parameters are, or in fp32 on the values of the bf16
parameters (--compute fp32), which is faster on CPUs without bf16. Each format trains from the same start on the same batches;
the spread between seeds tells what a difference means. Format split is left out: it has fp32's bits.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from kernels import torch_bridge  # noqa: E402

CONTEXT = 64
BATCH = 8
WIDTH = 96
LAYERS = 3
HEADS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]])))


def corpus():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    chosen = sorted(name for name in listed if name.endswith((".h", ".cpp", ".md", ".py")))
    text = b"".join((ROOT / name).read_bytes() for name in chosen)
    data = torch.tensor(list(text), dtype=torch.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batch(data, random):
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=random)
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, rows):
    inputs, targets = rows
    return functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def validate(model, data):
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return sum(loss_of(model, batch(data, random)).item() for _ in range(40)) / 40


def train(format, seed, chosen):
    torch.manual_seed(seed)
    model = Model().to(getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[chosen.compute]))
    parameters = [parameter.detach().bfloat16() for parameter in model.parameters()]
    train_data, test_data = corpus()
    random = torch.Generator().manual_seed(seed)
    options = dict(lr=chosen.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    optimizer = torch_bridge.Optimizer("AdamW", parameters, format, **options)
    curve = []
    for step in range(1, chosen.steps + 1):
        copy_values(parameters, model)
        optimizer.options.lr = chosen.lr * min(1, step / 100) * (1 - 0.9 * step / chosen.steps)
        model.zero_grad(set_to_none=True)
        loss_of(model, batch(train_data, random)).backward()
        optimizer.step([parameter.grad.bfloat16() for parameter in model.parameters()])
        if step % (chosen.steps // chosen.points) == 0:
            copy_values(parameters, model)
            curve.append(validate(model, test_data))
    return curve


def copy_values(parameters, model):
    with torch.no_grad():
        for value, parameter in zip(parameters, model.parameters(), strict=True):
            parameter.copy_(value)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--points", type=int, default=5, help="of each curve")
    arguments.add_argument("--lr", type=float, default=1e-3)
    arguments.add_argument("--compute", choices=("bf16", "fp32"), default="bf16", help="dtype of forward and backward")
    arguments.add_argument("--formats", nargs="+", default=["fp32", "bf16", "compact", "4bit"])
    chosen = arguments.parse_args()
    every = chosen.steps // chosen.points
    print(f"{sum(p.numel() for p in Model().parameters()):,} parameters; validation loss, mean of {chosen.seeds} seeds")
    print("| format | " + " | ".join(f"step {every * (i + 1)}" for i in range(chosen.points)) + " | spread of seeds |")
    print("|---" * (chosen.points + 2) + "|")
    for format in chosen.formats:
        curves = torch.tensor([train(format, seed, chosen) for seed in range(chosen.seeds)])
        spread = (curves[:, -1].max() - curves[:, -1].min()).item()
        cells = " | ".join(f"{loss:.4f}" for loss in curves.mean(0).tolist())
        print(f"| `{format}` | {cells} | {spread:.4f} |", flush=True)


if __name__ == "__main__":
    main()
