"""Recognise checkpoints of other programs by the names of their files."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from ballast.checkpoint.distributed import Distributed
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.universal import Universal
from ballast.checks import refuse

MOST_NAME = 4096  # characters of a path


class Source(Protocol):
    """Reads full parameters and moments, one at a time. Methods return None for values that the checkpoint lacks."""

    may_be_flat: bool  # a tensor may be stored flat, whatever its shape

    def shape(self, name: str, moment: str = "") -> tuple[int, ...] | None: ...
    def has_state(self, name: str) -> bool:
        """Return whether there is any optimizer state of this parameter."""

    def parameter(self, name: str) -> torch.Tensor: ...
    def moment(self, name: str, moment: str) -> torch.Tensor: ...
    def steps(self, name: str) -> int | None: ...


def source_of(directory: Path, trained: Sequence[str], known: Collection[str]) -> Source:
    """Return the reader of a checkpoint, or refuse it with the command that converts it. `known` are all names in the
    model, `trained` those that the checkpoint must have."""
    kind = kind_of(directory)
    if kind == "universal":
        return Universal(directory)
    if kind == "distributed":
        return Distributed(directory, trained, known)
    if kind == "deepspeed":
        refuse_deepspeed(directory)
    if kind == "safetensors":
        _refuse(
            "cannot load a training from safetensors files: they hold no optimizer state",
            directory,
            "ballast.load(model, files) reads parameters.",
        )
    raise AssertionError(kind)


def refuse_deepspeed(directory: Path) -> NoReturn:
    """Name the universal checkpoint, or the command that makes one. DeepSpeed keeps several checkpoints in a directory,
    by tag, and files that name the newest one and the newest universal one."""
    universal = _named(directory, "latest_universal")
    if (universal / "zero").exists():
        _refuse("cannot load several DeepSpeed checkpoints at once", directory, f"The newest universal one is {universal}.")
    newest = _named(directory, "latest")
    command = ["python", "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(newest), "--output_folder", f"{newest}-universal"]
    _refuse(
        "cannot load this DeepSpeed checkpoint: it is sharded for the ranks that wrote it",
        directory,
        f"Make it universal, and load {newest}-universal: {shlex.join(command)}",
    )


def _refuse(what: str, directory: Path, remedy: str) -> NoReturn:
    refuse(what, where=str(directory), needed="a checkpoint that any number of ranks can read", remedy=remedy)


def _named(directory: Path, file: str) -> Path:
    """Return the folder that a file of the directory names, or the directory itself without that file."""
    path = directory / file
    if not path.exists():
        return directory
    with open(path, errors="replace") as text:
        return directory / text.read(MOST_NAME).strip().partition("\n")[0].replace("\0", "")
