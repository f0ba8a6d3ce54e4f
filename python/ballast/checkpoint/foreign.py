"""Checkpoints of others: what a directory holds is told by the names of its files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from ballast.checks import refuse
from ballast.checkpoint.manifest import MANIFEST


class Source(Protocol):
    """Parameters with their moments, whole, one at a time."""

    def has(self, name: str) -> bool: ...
    def has_moment(self, name: str, moment: str) -> bool: ...
    def elements(self, name: str) -> int: ...
    def parameter(self, name: str) -> torch.Tensor: ...
    def moment(self, name: str, moment: str) -> torch.Tensor: ...
    def steps(self, name: str) -> int: ...


def kind_of(directory: Path) -> str:
    """Whose it is: "universal" is DeepSpeed's too, "distributed" is torch's; empty: nobody's that is known."""
    found = {
        "ballast": directory / MANIFEST,
        "universal": directory / "zero",
        "distributed": directory / ".metadata",
    }
    for kind, path in found.items():
        if path.exists():
            return kind
    patterns = {"deepspeed": "*_states.pt", "safetensors": "*.safetensors"}
    for kind, pattern in patterns.items():
        if any(directory.glob(pattern)) or any(directory.glob(f"*/{pattern}")):
            return kind
    return ""


def source_of(directory: Path) -> Source:
    """Of what can be read as it is; else refuses, with what makes it so."""
    kind = kind_of(directory)
    if kind == "universal":
        return Universal(directory / "zero")
    if kind == "distributed":
        return Distributed(directory)
    if kind == "deepspeed":
        _refuse(
            "a checkpoint of DeepSpeed is cut for the ranks that wrote it",
            directory,
            "Make it universal: python -m deepspeed.checkpoint.ds_to_universal --input_folder "
            f"{_tagged(directory)} --output_folder {directory}-universal",
        )
    if kind == "safetensors":
        _refuse("safetensors files hold no optimizer's state", directory, "ballast.load(model, files) reads parameters.")
    raise AssertionError(kind)


def _refuse(what: str, directory: Path, remedy: str) -> NoReturn:
    refuse(what, where=str(directory), needed="a checkpoint that any ranks can read", remedy=remedy)


def _tagged(directory: Path) -> Path:
    """DeepSpeed keeps several, by tag, and names the newest."""
    latest = directory / "latest"
    return directory / latest.read_text().strip() if latest.exists() else directory


class Universal:
    """What DeepSpeed's ds_to_universal writes: a folder for each parameter, a file for each of its tensors."""

    def __init__(self, folder: Path):
        self._folder = folder

    def has(self, name: str) -> bool:
        return (self._folder / name / "fp32.pt").exists()

    def has_moment(self, name: str, moment: str) -> bool:
        return (self._folder / name / f"{moment}.pt").exists()

    def elements(self, name: str) -> int:
        return int(self.parameter(name).numel())

    def parameter(self, name: str) -> torch.Tensor:
        return self._read(name, "fp32")

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self._read(name, moment)

    def steps(self, name: str) -> int:
        path = self._folder / name / "step.pt"
        return int(self._load(path)) if path.exists() else 0

    def _read(self, name: str, what: str) -> torch.Tensor:
        found = self._load(self._folder / name / f"{what}.pt")
        tensor: torch.Tensor = found["param"] if isinstance(found, dict) else found
        return tensor

    @staticmethod
    def _load(path: Path) -> Any:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class Distributed:
    """What torch.distributed.checkpoint writes of the state_dicts that its get_state_dict() gives."""

    def __init__(self, directory: Path):
        from torch.distributed.checkpoint import FileSystemReader

        self._directory = directory
        self._known = FileSystemReader(directory).read_metadata().state_dict_metadata
        self._keys: dict[str, str] = {}  # by each of their ends, the shortest
        for key in sorted(self._known, key=len):
            words = key.split(".")
            for first in range(len(words)):
                self._keys.setdefault(".".join(words[first:]), key)

    def has(self, name: str) -> bool:
        return self._key_of(name) is not None

    def has_moment(self, name: str, moment: str) -> bool:
        return self._key_of(f"state.{name}.{moment}") is not None

    def elements(self, name: str) -> int:
        shape: tuple[int, ...] = self._known[self._key_of(name)].size
        return math.prod(shape)

    def parameter(self, name: str) -> torch.Tensor:
        return self._read(self._key_of(name))

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self._read(self._key_of(f"state.{name}.{moment}"))

    def steps(self, name: str) -> int:
        key = self._key_of(f"state.{name}.step")
        return 0 if key is None else int(self._read(key))

    def _key_of(self, name: str) -> str | None:
        """Under whatever the state_dicts were called: "model", "optim"."""
        return self._keys.get(name)

    def _read(self, key: Any) -> torch.Tensor:
        from torch.distributed.checkpoint import FileSystemReader, load

        known = self._known[key]
        into = {key: torch.empty(known.size, dtype=known.properties.dtype)}
        load(into, storage_reader=FileSystemReader(self._directory), no_dist=True)
        return into[key]
