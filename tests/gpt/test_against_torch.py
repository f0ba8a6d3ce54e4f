"""Compare the GPT trainer with the same model in PyTorch: same initial values, same text, AdamW; losses, norms, parameters.

Both compute in fp32, in different orders: 1/20,000 of a loss is allowed, and 1/200 of what the rate lets a parameter move.
"""

import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")

import torch.nn.functional as F  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")) / "examples" / "gpt" / "gpt"
TEXT = ROOT / "LICENSE"

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, MICRO_STEPS, STEPS, SEED = 2, 48, 3, 40, 3, 2, 8, 7
RATE, DECAY, MAX_NORM = 1e-3, 0.1, 0.7


@pytest.fixture(autouse=True)
def program():
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")


def train_ours(folder: Path, steps: int, *more: str) -> tuple[list[list[float]], torch.Tensor]:
    options = dict(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT, batch=BATCH, steps=steps, seed=SEED)
    options |= {"micro-steps": MICRO_STEPS, "lr": RATE, "weight-decay": DECAY, "max-norm": MAX_NORM, "dtype": "fp32"}
    options |= {"text": TEXT, "losses": folder / "losses", "save": folder / "parameters"}
    command = [str(PROGRAM), *(f"--{name}={value}" for name, value in options.items()), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lines = (folder / "losses").read_text().splitlines()[:-1]  # the last one has the hash
    losses = [[float.fromhex(number) for number in line.split()[1:]] for line in lines]
    return losses, torch.frombuffer(bytearray((folder / "parameters").read_bytes()), dtype=torch.float32)


def shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """In the program's order of units and tensors."""
    named = {"tokens": (256, WIDTH), "positions": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        for name, outputs, inputs in [("norm", WIDTH, None), ("qkv", 3 * WIDTH, WIDTH), ("projection", WIDTH, WIDTH),
                                      ("norm2", WIDTH, None), ("widen", 4 * WIDTH, WIDTH), ("narrow", WIDTH, 4 * WIDTH)]:
            named[f"{layer}.{name}.weight"] = (outputs, inputs) if inputs else (outputs,)
            named[f"{layer}.{name}.bias"] = (outputs,)
    named |= {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}
    return named if tied else named | {"head": (256, WIDTH)}


def named_parts(flat: torch.Tensor, tied: bool) -> dict[str, torch.Tensor]:
    parts, first = {}, 0
    for name, shape in shapes(tied).items():
        count = torch.Size(shape).numel()
        parts[name] = flat[first : first + count].reshape(shape).clone()
        first += count
    assert first == flat.numel()
    return parts


def loss_of(p: dict[str, torch.Tensor], text: torch.Tensor) -> torch.Tensor:
    tokens, targets = text[:, :-1], text[:, 1:]
    x = p["tokens"][tokens] + p["positions"]
    for layer in range(LAYERS):
        linear = lambda x, name: F.linear(x, p[f"{layer}.{name}.weight"], p[f"{layer}.{name}.bias"])
        norm = lambda x, name: F.layer_norm(x, (WIDTH,), p[f"{layer}.{name}.weight"], p[f"{layer}.{name}.bias"])
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in linear(norm(x, "norm"), "qkv").chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + linear(attended, "projection")
        x = x + linear(F.gelu(linear(norm(x, "norm2"), "widen"), approximate="tanh"), "narrow")
    x = F.layer_norm(x, (WIDTH,), p["norm.weight"], p["norm.bias"])
    return F.cross_entropy(F.linear(x, p.get("head", p["tokens"])).flatten(0, 1), targets.flatten())


def noise(*numbers: int) -> int:
    """examples/gpt/noise.h: which sequences the program draws."""
    x, mask = 0, 2**64 - 1
    for number in numbers:
        x = (x + number + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return x


def draw(step: int, micro_step: int) -> torch.Tensor:
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    length = CONTEXT + 1
    begins = [noise(SEED, step, micro_step, 0, i) % (len(text) - length + 1) for i in range(BATCH)]
    return torch.stack([text[begin : begin + length] for begin in begins])


def train_theirs(parameters: dict[str, torch.Tensor]) -> list[list[float]]:
    for tensor in parameters.values():
        tensor.requires_grad_()
    matrices = [tensor for tensor in parameters.values() if tensor.dim() == 2]
    others = [tensor for tensor in parameters.values() if tensor.dim() == 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(parameters, draw(step, micro_step)) for micro_step in range(MICRO_STEPS)]
        loss = sum(losses) / MICRO_STEPS
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        optimizer.step()
        steps.append([loss.item(), norm.item()])
    return steps


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_training_follows_torch(tmp_path: Path, tied: bool):
    more = [] if tied else ["--untied"]
    _, first = train_ours(tmp_path, 0, *more)
    ours, last = train_ours(tmp_path, STEPS, *more)
    parameters = named_parts(first, tied)
    theirs = train_theirs(parameters)
    assert theirs[-1][0] < theirs[0][0] - 0.3
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=5e-4, atol=0)
    assert [step[0] for step in ours] == pytest.approx([step[0] for step in theirs], rel=5e-5)
    for name, found in named_parts(last, tied).items():
        worst = (found - parameters[name].detach()).abs().max().item()
        assert worst <= RATE * STEPS / 200, name
