"""Checkpoints of others: what a directory holds is told by the names of its files."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from ballast.checkpoint.distributed import Distributed
from ballast.checkpoint.manifest import MANIFEST
from ballast.checkpoint.universal import Universal
from ballast.checks import refuse


class Source(Protocol):
    """Parameters with their moments, whole, one at a time; None for what it lacks."""

    may_be_flat: bool  # tensors of any shape

    def shape(self, name: str, moment: str = "") -> tuple[int, ...] | None: ...
    def has_state(self, name: str) -> bool:
        """Anything that the optimizer keeps."""

    def parameter(self, name: str) -> torch.Tensor: ...
    def moment(self, name: str, moment: str) -> torch.Tensor: ...
    def steps(self, name: str) -> int | None: ...


def kind_of(directory: Path) -> str:
    """Whose it is: "universal" is DeepSpeed's too, "distributed" is torch's; empty: nobody's that is known."""
    found = {
        "ballast": directory / MANIFEST,
        "universal": directory / "zero",
        "distributed": directory / ".metadata",
        "deepspeed": directory / "latest_universal",
    }
    for kind, path in found.items():
        if path.exists():
            return kind
    patterns = {"deepspeed": "*_states.pt", "safetensors": "*.safetensors"}
    for kind, pattern in patterns.items():
        if any(directory.glob(pattern)) or any(directory.glob(f"*/{pattern}")):
            return kind
    return ""


def source_of(directory: Path, trained: Sequence[str], known: Collection[str]) -> Source:
    """Of what can be read as it is; else refuses, with what makes it so. `known` are the names of all that there is in the
    model, `trained` of what has to be found."""
    kind = kind_of(directory)
    if kind == "universal":
        return Universal(directory)
    if kind == "distributed":
        return Distributed(directory, trained, known)
    if kind == "deepspeed":
        _refuse_deepspeed(directory)
    if kind == "safetensors":
        _refuse("safetensors files hold no optimizer's state", directory, "ballast.load(model, files) reads parameters.")
    raise AssertionError(kind)


def _refuse_deepspeed(directory: Path) -> NoReturn:
    """It keeps several in a directory, by tag, and names the newest; universal ones beside them, and the newest of those."""
    universal = _named(directory, "latest_universal")
    if (universal / "zero").exists():
        _refuse("a directory of checkpoints of DeepSpeed was given", directory, f"The last universal one is {universal}.")
    newest = _named(directory, "latest")
    command = ["python", "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(newest), "--output_folder", f"{newest}-universal"]
    _refuse(
        "a checkpoint of DeepSpeed is cut for the ranks that wrote it",
        directory,
        f"Make it universal, and load {newest}-universal: {shlex.join(command)}",
    )


def _refuse(what: str, directory: Path, remedy: str) -> NoReturn:
    refuse(what, where=str(directory), needed="a checkpoint that any ranks can read", remedy=remedy)


def _named(directory: Path, file: str) -> Path:
    """By what a file says; itself without one."""
    path = directory / file
    return directory / path.read_text().strip() if path.exists() else directory
