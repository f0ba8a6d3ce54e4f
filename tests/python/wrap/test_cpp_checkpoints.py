"""Tests of checkpoints that trainings in C++ and in Python share: each goes on from what the other has saved."""

from __future__ import annotations

import subprocess
from pathlib import Path

import ballast
import pytest
import torch
from ballast.tools.command_line import main
from python.wrap.support.ranks import run_ranks
from safetensors.torch import load_file

STEPS = 3
BUILD = Path(ballast._core.__file__).resolve().parents[2]
SHAPE = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--dtype", "fp32"]


def train_in_cpp(folder: Path, *options: object) -> str:
    """Run the GPT trainer, which loads the checkpoint if there is one, and saves to the same folder. Return what it prints."""
    program = [BUILD / "examples/gpt/gpt", *SHAPE, "--checkpoint", folder, *map(str, options)]
    return subprocess.run(program, check=True, capture_output=True, text=True).stdout


class Gpt(torch.nn.Module):
    """The parameters of the GPT trainer in C++, under its names."""

    def __init__(self) -> None:
        super().__init__()
        width = 64
        self.tokens, self.positions = (torch.nn.Parameter(torch.randn(rows, width) * 0.02) for rows in (256, 32))
        layers = {"norm": (width,), "qkv": (3 * width, width), "projection": (width, width), "second_norm": (width,)}
        layers |= {"widen": (4 * width, width), "narrow": (width, 4 * width)}
        self.h, self.head = torch.nn.ModuleList(), torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(width)})
        for _ in range(2):
            block = torch.nn.ModuleDict()
            for name, shape in layers.items():
                block[name] = torch.nn.LayerNorm(width) if len(shape) == 1 else torch.nn.Linear(*reversed(shape))
            self.h.append(block)


def train(rank: int, folder: str, stage: int, loads: bool, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], object]:
    """Train in Python up to this step, and save. Return the parameters, and the extra that was loaded."""
    torch.manual_seed(0)
    model, extra = Gpt(), None
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3), model, stage=stage)
    if loads:
        extra = ballast.load_checkpoint(folder, model, optimizer)
    while optimizer.steps < steps:
        sum(each.square().sum() for each in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(model):
        values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    ballast.save(folder, model, optimizer, extra=f"rank {rank}".encode())
    return values, extra


@pytest.mark.parametrize("stage", [0, 2])
def test_a_training_goes_on_in_cpp_and_comes_back(stage, tmp_path):
    run_ranks(2, train, str(tmp_path / "here"), stage, False)
    train_in_cpp(tmp_path / "here", "--steps", STEPS, "--ranks", 3, "--stage", 3)  # it makes no step, and saves again
    [(values, extra)] = run_ranks(1, train, str(tmp_path / "here"), stage, True, STEPS + 2)
    assert extra == b"rank 0"  # the note in C++
    [(straight, _)] = run_ranks(1, train, str(tmp_path / "straight"), stage, False, STEPS + 2)
    assert all(torch.equal(values[name], straight[name]) for name in straight)
    assert f"\n{STEPS + 3:>6}   " in train_in_cpp(tmp_path / "here", "--steps", STEPS + 3, "--ranks", 2)


def test_what_a_training_in_cpp_has_saved_is_used_here(tmp_path, capsys):
    train_in_cpp(tmp_path / "cpp", "--ranks", 2, "--stage", 2, "--steps", 2)
    assert main(["inspect", str(tmp_path / "cpp")]) == 0
    assert "a training in C++" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "cpp")]) == 0
    assert main(["export", str(tmp_path / "cpp"), str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    model = Gpt()
    ballast.load(model, tmp_path / "cpp")
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())
    part = torch.nn.ModuleDict({"head": torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(64)})})  # further tensors are ignored
    optimizer = ballast.wrap(torch.optim.AdamW(part.parameters()), part)
    ballast.load_checkpoint(tmp_path / "cpp", part, optimizer)
    assert optimizer.steps == 2
    assert torch.equal(part["head"]["norm"].weight, exported["head.norm.weight"])
    assert optimizer.state[part["head"]["norm"].weight]["exp_avg"].abs().sum() > 0


def test_an_own_step_is_refused_in_cpp(tmp_path):
    model = Gpt()
    optimizer = ballast.wrap(torch.optim.RMSprop(model.parameters()), model)
    sum(each.square().sum() for each in model.parameters()).backward()
    optimizer.step()
    ballast.save(tmp_path, model, optimizer)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        train_in_cpp(tmp_path, "--steps", 2)
    assert "B1009" in failed.value.stderr and "it is of another update rule" in failed.value.stderr
    assert "that of RMSprop" in failed.value.stderr


def test_what_cpp_cannot_keep_is_refused_on_all_ranks_and_numbers_of_python_are_no_obstacle(tmp_path):
    torch.manual_seed(0)
    model = Gpt()
    optimizer = ballast.wrap(torch.optim.AdamW([{"params": list(model.parameters()), "mine": float("inf")}]), model)
    optimizer.memory()
    ballast.save(tmp_path, model, optimizer, extra=bytes(100_000))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        train_in_cpp(tmp_path, "--steps", 2, "--ranks", 2)
    assert "its note does not fit into a commit" in failed.value.stderr
    ballast.save(tmp_path, model, optimizer, extra=b"")
    assert len([*tmp_path.glob("step-*")]) == 1  # the folder before is removed
    train_in_cpp(tmp_path, "--steps", 1, "--ranks", 2)
