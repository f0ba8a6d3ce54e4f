"""Compare the Llama trainer in C++ with the same model in transformers and torch.optim.AdamW: weights, tokens, losses, norms.

Both compute in fp32, in different orders.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from llama.trainer import (
    CONFIGS,
    DECAY,
    MAX_NORM,
    MICRO_STEPS,
    PROGRAM,
    RATE,
    STEPS,
    command_of,
    draw,
    make_model,
    train_ours,
    write_tokens,
)
from ports import free_port
from torch.nn import functional
from transformers import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def program():
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built: oneDNN is missing")


def train_theirs(model: torch.nn.Module, tokens: numpy.ndarray, ranks: int) -> list[list[float]]:
    matrices = [tensor for tensor in model.parameters() if tensor.dim() == 2]
    others = [tensor for tensor in model.parameters() if tensor.dim() == 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for text in (draw(tokens, step, micro_step, rank) for micro_step in range(MICRO_STEPS) for rank in range(ranks)):
            logits = model(text[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / (MICRO_STEPS * ranks)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        steps.append([total, norm.item()])
    return steps


@pytest.fixture(params=list(CONFIGS))
def trial(request, tmp_path: Path) -> SimpleNamespace:
    model = make_model(CONFIGS[request.param], tmp_path / "model")
    layout = ["nanoGPT", "llm.c", "llmq"][list(CONFIGS).index(request.param) % 3]
    tokens = write_tokens(tmp_path / "tokens.bin", layout)
    return SimpleNamespace(folder=tmp_path, model=model, tokens=tokens, file=tmp_path / "tokens.bin")


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_weights_are_those_of_transformers(trial, ranks):
    out = trial.folder / "out"
    ours = train_ours(trial.folder, trial.file, trial.folder / "losses", "--ranks", ranks, "--stage", 3, "--save", out)
    theirs = train_theirs(trial.model, trial.tokens, ranks)
    assert theirs[-1][0] < theirs[0][0] - 0.1
    assert [step[0] for step in ours] == pytest.approx([step[0] for step in theirs], abs=1e-5)
    assert [step[1] for step in ours] == pytest.approx([step[1] for step in theirs], rel=5e-4)
    saved = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in trial.model.named_parameters():
        off = (saved.get_parameter(name) - parameter).abs() / (RATE * STEPS)  # of what AdamW lets a parameter move
        assert off.max().item() <= 1 / 5 and off.mean().item() <= 1 / 1000, name  # AdamW enlarges errors of tiny gradients


def test_a_killed_training_resumes_to_the_same_bits(tmp_path):
    make_model(CONFIGS["qwen 3"], tmp_path / "model")
    write_tokens(tmp_path / "tokens.bin", "nanoGPT")
    tokens, steps = tmp_path / "tokens.bin", 300
    straight = train_ours(tmp_path, tokens, tmp_path / "straight", steps=steps)
    on_drive = ("--state", "nvme", "--drive", tmp_path, "--run", "killed", "--ranks", 1)
    losses = tmp_path / "killed"
    program = subprocess.Popen(command_of(tmp_path, tokens, losses, *on_drive, steps=steps), stdout=subprocess.DEVNULL)
    while not losses.exists() or len(losses.read_text().splitlines()) < 4:
        assert program.poll() is None
    program.kill()
    assert program.wait() == -signal.SIGKILL
    rest = train_ours(tmp_path, tokens, tmp_path / "rest", *on_drive, steps=steps)
    assert 0 < len(rest) < steps  # the last step before the kill may be made again
    assert rest == straight[-len(rest) :]


def test_the_order_of_layers_and_micro_steps_changes_no_bit(tmp_path):
    make_model(CONFIGS["llama 3"], tmp_path / "model")  # a tied table sums in another order
    write_tokens(tmp_path / "tokens.bin", "nanoGPT")
    by_micro_steps = train_ours(tmp_path, tmp_path / "tokens.bin", tmp_path / "losses", "--ranks", 2)
    on_drive = ("--ranks", 2, "--layer-major", "--parameters", "nvme", "--state", "nvme", "--drive", tmp_path)
    assert train_ours(tmp_path, tmp_path / "tokens.bin", tmp_path / "losses", *on_drive) == by_micro_steps


def test_what_a_model_lacks_is_named(tmp_path):
    make_model(CONFIGS["qwen 3"], tmp_path / "model")
    write_tokens(tmp_path / "tokens.bin", "nanoGPT")
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    ended = subprocess.run([PROGRAM, tmp_path / "other", tmp_path / "tokens.bin"], capture_output=True, text=True)
    assert ended.returncode != 0
    assert "model.layers.2" in ended.stderr
    ended = subprocess.run([PROGRAM, tmp_path / "missing", tmp_path / "tokens.bin"], capture_output=True, text=True)
    assert ended.returncode != 0
    assert "Directory does not exist" in ended.stdout + ended.stderr


def test_ranks_of_the_command_and_of_a_launcher_contradict_each_other(tmp_path):
    make_model(CONFIGS["qwen 3"], tmp_path / "model")
    write_tokens(tmp_path / "tokens.bin", "nanoGPT")
    command = [PROGRAM, tmp_path / "model", tmp_path / "tokens.bin", "--ranks", "3"]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "BALLAST_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate()[1] for rank in ranks]
    assert all(rank.returncode != 0 for rank in ranks)
    assert any("cannot use --ranks 3: a launcher has started 2 ranks" in words for words in said)
