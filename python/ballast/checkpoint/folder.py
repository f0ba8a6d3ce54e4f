"""The directory of a checkpoint: a manifest, and next to it a folder with the files that it names. A new checkpoint
gets a new folder. Renaming its manifest into place makes it the current one. The old folder is removed when all ranks
have seen that."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ballast import _core
from ballast.checkpoint.manifest import outline_in, rank_file
from ballast.checks import refuse
from ballast.torch.parameters.units import names_in_model

log = logging.getLogger("ballast")


def lock(directory: Path) -> _core.CheckpointDirectory:
    """Make the directory, and lock it while this job saves. Raise B2204 where another job does."""
    require_no_file(directory)
    locked = _core.CheckpointDirectory(str(directory))
    if locked.warning:
        log.warning("%s", locked.warning)
    return locked


def folder_name(step: int, token: int) -> str:
    """Return the name of a checkpoint's folder.

    >>> folder_name(12, 255)
    'step-12-000000ff'
    """
    return f"step-{step}-{token:08x}"


def require_same_model(directory: Path, names: Collection[str]) -> None:
    """Refuse to replace a checkpoint that has no tensor of these names: two models would replace each other's
    checkpoints."""
    found = outline_in(directory)
    there = {} if found is None else found.tensors
    if there and not any(own in names for own in names_in_model(there.keys(), names).values()):
        refuse(
            "cannot replace a checkpoint of another model: it has no tensor with a name of this model",
            where=str(directory),
            needed="one directory for each model, and for each part of a model that different ranks hold",
            available=f"a checkpoint with {next(iter(there))}",
            remedy="Save to another directory, or remove the checkpoint that is there.",
        )


def require_no_file(directory: Path) -> None:
    """Refuse a path that is a file, or that leads through one."""
    for path in (directory, *directory.parents):
        if os.path.isfile(path):  # false where a parent is closed to this user
            refuse(
                f"cannot save a checkpoint: {path} is a file",
                where=str(directory),
                needed="a directory, or a path that is free",
                remedy="Save to another path, or remove the file.",
            )


@dataclass(frozen=True)
class Commit:
    """A folder to which ranks write, and what its manifest will say. The directory is locked."""

    path: Path
    directory: _core.CheckpointDirectory
    saved: _core.SavedCheckpoint

    @property
    def folder(self) -> str:
        return self.saved.folder

    def is_complete(self) -> bool:
        """Return whether all ranks have written their files. The folder is listed, as a network file system may remember for
        a while that a name was not there."""
        names = {rank_file(rank, "json") for rank in range(self.saved.ranks)}
        return names.issubset(os.listdir(self.path / self.folder))

    def make_current(self) -> None:
        """Write the manifest, with the seals of all ranks' indexes as they are on the drive."""
        self.directory.make_current(self.folder, self.saved.manifest(str(self.path / self.folder)))
