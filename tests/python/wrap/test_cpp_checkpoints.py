"""Tests of checkpoints that trainings in C++ and in Python share: each goes on from what the other has saved, with the class of
transformers here and with the Llama trainer there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import ballast
import pytest
import torch
from ballast.tools.command_line import main
from llama.trainer import CONFIGS, DECAY, MAX_NORM, MICRO_STEPS, PROGRAM, RATE, draw, make_model, train_ours, write_tokens
from python.wrap.support.ranks import run_ranks
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built: oneDNN is missing")
    make_model(CONFIGS["qwen 3"], tmp_path / "model")
    write_tokens(tmp_path / "tokens.bin", "nanoGPT")
    return tmp_path


def in_cpp(folder: Path, steps: int, *options: object) -> list[list[float]]:
    """Train to this step on the checkpoint of the folder, and save there. Return loss and norm of each step made."""
    saved = ("--checkpoint", folder / "checkpoint")
    return train_ours(folder, folder / "tokens.bin", folder / "losses", *saved, *options, steps=steps)


def made(folder: Path, **options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager", dtype=torch.float32)
    decaying = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [dict(params=decaying, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    return model, ballast.wrap(torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95)), model, **options)


def in_python(rank: int, folder: Path, steps: int, stage: int) -> list[float]:
    """The same as in_cpp(); return the losses."""
    tokens = write_tokens(folder / f"tokens-{rank}.bin", "nanoGPT")
    model, optimizer = made(folder, stage=stage, max_grad_norm=MAX_NORM)
    if (folder / "checkpoint").exists():
        ballast.load_checkpoint(folder / "checkpoint", model, optimizer)
    losses = []
    while optimizer.steps < steps:
        total = 0.0
        for micro_step in range(MICRO_STEPS):
            text = draw(tokens, optimizer.steps, micro_step, rank)
            logits = model(text[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / MICRO_STEPS
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    ballast.save(folder / "checkpoint", model, optimizer, extra=f"rank {rank}".encode())
    return losses


def of_ranks(losses: list[list[float]]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_goes_from_cpp_to_python_and_back(folder, stage):
    straight = in_cpp(folder, 9, "--ranks", 2)
    (folder / "checkpoint").rename(folder / "straight")
    losses = [step[0] for step in in_cpp(folder, 3, "--ranks", 2, "--stage", stage, "--state", "host")]
    losses += of_ranks(run_ranks(2, in_python, folder, 6, 4 - stage))
    losses += [step[0] for step in in_cpp(folder, 9, "--ranks", 2, "--stage", 0)]
    assert losses == pytest.approx([step[0] for step in straight], abs=1e-5)


def test_another_number_of_ranks_loses_no_bit(folder):
    run_ranks(2, in_python, folder, 3, 2)
    model, optimizer = made(folder)
    ballast.load_checkpoint(folder / "checkpoint", model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert in_cpp(folder, 3, "--ranks", 3, "--stage", 3) == []  # it makes no step, and saves again
    model, optimizer = made(folder)
    assert ballast.load_checkpoint(folder / "checkpoint", model, optimizer) == b"rank 0"  # the note in C++
    assert optimizer.steps == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_training_in_cpp_has_saved_is_used_here(folder, capsys):
    in_cpp(folder, 2, "--ranks", 2, "--stage", 2)
    checkpoint = folder / "checkpoint"
    assert main(["inspect", str(checkpoint)]) == 0
    assert "a training in C++" in capsys.readouterr().out
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["export", str(checkpoint), str(folder / "exported")]) == 0
    exported = load_file(folder / "exported" / "model.safetensors")
    model, _ = made(folder)
    ballast.load(model, checkpoint)
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())
    part = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(48)})})  # further tensors are ignored
    optimizer = ballast.wrap(torch.optim.AdamW(part.parameters()), part)
    ballast.load_checkpoint(checkpoint, part, optimizer)
    assert optimizer.steps == 2
    assert torch.equal(part["model"]["norm"].weight, exported["model.norm.weight"])
    assert optimizer.state[part["model"]["norm"].weight]["exp_avg"].abs().sum() > 0


def refusal(folder: Path, *options: object) -> str:
    saved = ("--context", 16, "--checkpoint", folder / "checkpoint")
    command = [PROGRAM, folder / "model", folder / "tokens.bin", *saved, *options]
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert ended.returncode != 0
    return ended.stderr


def test_an_own_step_is_refused_in_cpp(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = ballast.wrap(torch.optim.RMSprop(model.parameters()), model)
    sum(each.square().sum() for each in model.parameters()).backward()
    optimizer.step()
    ballast.save(folder / "checkpoint", model, optimizer)
    error = refusal(folder)
    assert "B1009" in error and "it is of another update rule" in error
    assert "that of RMSprop" in error


def test_what_cpp_cannot_keep_is_refused_on_all_ranks_and_numbers_of_python_are_no_obstacle(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = ballast.wrap(torch.optim.AdamW([{"params": list(model.parameters()), "mine": float("inf")}]), model)
    optimizer.memory()
    ballast.save(folder / "checkpoint", model, optimizer, extra=bytes(100_000))
    assert "its note does not fit into a commit" in refusal(folder, "--ranks", 2)
    ballast.save(folder / "checkpoint", model, optimizer, extra=b"")
    assert len([*(folder / "checkpoint").glob("step-*")]) == 1  # the folder before is removed
    in_cpp(folder, 1, "--ranks", 2)
