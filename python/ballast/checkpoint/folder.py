"""The directory of a checkpoint: a manifest, and beside it a folder with the files that it names. A new checkpoint gets a
folder of its own; renaming its manifest into place makes it the current one. The old folder goes when all ranks have seen
that."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ballast import _core
from ballast.checkpoint.manifest import MANIFEST, content_in, folder_in
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.sizes import human_size
from ballast.wrapper.plain import own_names

log = logging.getLogger("ballast")

FOLDER = re.compile(r"step-\d+-[0-9a-f]{8}")


class CheckpointDirectory:
    """The directory while one job saves to it, locked until `release()`. Rank 0 of the job makes it."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        flush_folder(directory.parent)
        self._directory = directory
        self._lock = lock_of(directory)
        self._replaced = ""  # the folder of the checkpoint that the new one has replaced

    def create(self, folder: str) -> None:
        """Make the folder, and remove what savings left that were stopped."""
        self.remove_stale()
        (self._directory / folder).mkdir(mode=0o700)

    def make_current(self, folder: str, manifest: bytes) -> None:
        """Replace the manifest: readers find the old checkpoint before, and the new one afterwards."""
        self._replaced = folder_in(self._directory) or ""
        flush_folder(self._directory / folder)
        flush_folder(self._directory)
        written = self._directory / folder / MANIFEST
        write_file(written, manifest)
        os.replace(written, self._directory / MANIFEST)
        flush_folder(self._directory)

    def remove_stale(self) -> None:
        """Remove the folders that the manifest does not name. Without a lock another job may be writing one of them: then
        only the one goes that was replaced."""
        current = folder_in(self._directory)
        if current is None:
            return  # a manifest that cannot be read is no reason not to save; until that is done everything stays
        for path in self._directory.iterdir():
            may_go = self._lock is not None or path.name == self._replaced
            if FOLDER.fullmatch(path.name) and path.name != current and may_go:
                shutil.rmtree(path, ignore_errors=True)

    def discard(self, folder: str) -> None:
        """Remove what a saving that failed has written, unless the manifest names it already, or may: then nothing else is
        whole."""
        if folder_in(self._directory) not in (folder, None):
            shutil.rmtree(self._directory / folder, ignore_errors=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def lock_of(directory: Path) -> _core.DirectoryLock | None:
    """None where the file system has no locks; B2204 where another process has it."""
    try:
        return _core.DirectoryLock(directory=str(directory))
    except Error as error:
        if error.code != "B2205":
            raise
        log.warning(
            "%s; two jobs that save to %s at once are not kept apart, and folders that a stopped saving left stay",
            error.what_happened,
            directory,
        )
        return None


def folder_name(step: int, token: int) -> str:
    """
    >>> folder_name(12, 255)
    'step-12-000000ff'
    """
    return f"step-{step}-{token:08x}"


def require_same_model(directory: Path, names: Collection[str]) -> None:
    """Refuses to replace a checkpoint none of whose tensors has one of these names: two models would take each other's away."""
    there = (content_in(directory) or {}).get("tensors", {})
    if there and not any(own in names for own in own_names(there.keys(), names).values()):
        refuse(
            "a checkpoint of another model would be replaced: no tensor of it has the name of one of this model",
            where=str(directory),
            needed="a directory for each model, and for each part of one that ranks have apart",
            available=f"one with {next(iter(there))}",
            remedy="Save to another directory, or remove the checkpoint that is there.",
        )


def require_same_history(directory: Path, known: Collection[str], ours: Collection[str]) -> None:
    """Refuse to replace a checkpoint that is not one of `ours`, where this training has saved or loaded the `known` folders.
    Two jobs would take turns otherwise, and a reader would get now the state of one and now that of the other."""
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
                what="the checkpoint does not fit on the drive",
                where=str(directory),
                needed=human_size(needed),
                available=human_size(available),
                remedy="Free space, or save to another drive. A checkpoint that is there already stays as it is.",
            ),
        )


def write_file(path: Path, content: bytes) -> None:
    """On the drive when this returns."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(directory: Path) -> None:
    """New names in it are on the drive when this returns."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
