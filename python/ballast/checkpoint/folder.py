"""The directory of a checkpoint: a manifest, and next to it a folder with the files that it names. A new checkpoint
gets a new folder. Renaming its manifest into place makes it the current one. The old folder is removed when all ranks
have seen that."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from ballast import _core
from ballast.checkpoint.contents import FOLDER
from ballast.checkpoint.kinds import MANIFEST
from ballast.checkpoint.manifest import content_in, folder_in
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.new_files import require_own_folder
from ballast.sizes import human_size
from ballast.torch.tensor_names import names_in_model

log = logging.getLogger("ballast")


class CheckpointDirectory:
    """A directory while one job saves to it, locked until `release()`. Rank 0 of the job uses it."""

    def __init__(self, directory: Path):
        require_no_file(directory)
        make_folder(directory)
        require_own_folder(directory)
        self.path = directory
        self._lock = lock_of(directory)
        self._replaced = ""  # the folder of the checkpoint that the new one has replaced

    def create(self, folder: str) -> None:
        """Make the folder, and remove the folders of savings that were stopped."""
        self.remove_stale()
        (self.path / folder).mkdir(mode=0o700)

    def make_current(self, folder: str, manifest: bytes) -> None:
        """Replace the manifest. Readers find the old checkpoint before, and the new one afterwards."""
        self._replaced = folder_in(self.path) or ""
        flush_folder(self.path / folder)
        flush_folder(self.path)
        written = self.path / folder / MANIFEST
        write_file(written, manifest)
        os.replace(written, self.path / MANIFEST)
        flush_folder(self.path)

    def remove_stale(self) -> None:
        """Remove the folders that the manifest does not name. Without a lock, another job may be writing one of them,
        so only the folder that was replaced is removed."""
        current = folder_in(self.path)
        if current is None:
            return  # the manifest cannot be read; everything stays until a saving has replaced it
        for path in self.path.iterdir():
            is_stale = self._lock is not None or path.name == self._replaced
            if FOLDER.fullmatch(path.name) and path.name != current and is_stale:
                shutil.rmtree(path, ignore_errors=True)

    def discard(self, folder: str) -> None:
        """Remove the files of a saving that failed, unless the manifest names them, or may name them: then no other
        checkpoint is complete."""
        if folder_in(self.path) not in (folder, None):
            shutil.rmtree(self.path / folder, ignore_errors=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def lock_of(directory: Path) -> _core.DirectoryLock | None:
    """Lock the directory. Return None where the file system has no locks; raise B2204 where another process has the
    lock."""
    try:
        return _core.DirectoryLock(directory=str(directory))
    except Error as error:
        if error.code != "B2205":
            raise
        log.warning(
            "%s; nothing prevents two jobs from saving to %s at once, and folders of stopped savings are not removed",
            error.what_happened,
            directory,
        )
        return None


def folder_name(step: int, token: int) -> str:
    """Return the name of a checkpoint's folder.

    >>> folder_name(12, 255)
    'step-12-000000ff'
    """
    return f"step-{step}-{token:08x}"


def require_same_model(directory: Path, names: Collection[str]) -> None:
    """Refuse to replace a checkpoint that has no tensor of these names: two models would replace each other's
    checkpoints."""
    there = (content_in(directory) or {}).get("tensors", {})
    if there and not any(own in names for own in names_in_model(there.keys(), names).values()):
        refuse(
            "cannot replace a checkpoint of another model: it has no tensor with a name of this model",
            where=str(directory),
            needed="one directory for each model, and for each part of a model that different ranks hold",
            available=f"a checkpoint with {next(iter(there))}",
            remedy="Save to another directory, or remove the checkpoint that is there.",
        )


def require_same_history(directory: Path, known: Collection[str], ours: Collection[str]) -> None:
    """Refuse to replace a checkpoint that is not one of `ours`, if this training has saved or loaded the `known`
    folders here. Otherwise two jobs would take turns, and a reader would get the state of either."""
    there = content_in(directory) or {}
    if known and there and there["folder"] not in ours:
        fail(
            "directory_in_use",
            _core.Problem(
                what=f"cannot save: another job has saved step {there['step']} here since this training saved or loaded",
                where=str(directory),
                needed="one job that saves to a directory",
                remedy="Stop the other job, or save to another directory. To resume from the checkpoint that is there, load "
                "it; to replace it, remove it first.",
            ),
        )


def require_space(directory: Path, needed: int) -> None:
    found = os.statvfs(directory)
    available = found.f_bavail * found.f_frsize
    if needed > available:
        fail(
            "drive_full",
            _core.Problem(
                what="cannot save a checkpoint: it does not fit on the drive",
                where=str(directory),
                needed=human_size(needed),
                available=human_size(available),
                remedy="Free space, or save to another drive. An existing checkpoint stays as it is.",
            ),
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


def write_file(path: Path, content: bytes) -> None:
    """Write a file, which is on the drive when this returns."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folder(directory: Path) -> None:
    """Make a folder and its parents, unless they exist. Those that are made are on the drive when this returns. The parent of
    an existing folder needs no permission to read it."""
    try:
        directory.mkdir()
    except FileNotFoundError:
        if directory.parent == directory:
            raise
        make_folder(directory.parent)
        directory.mkdir(exist_ok=True)
    except OSError:
        if not directory.is_dir():
            raise
        return
    flush_folder(directory.parent)


def flush_folder(directory: Path) -> None:
    """Flush a folder: new names in it are on the drive when this returns."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
