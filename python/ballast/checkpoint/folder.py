"""The directory of a checkpoint: a manifest, and next to it a folder with the files that it names. A new checkpoint
gets a new folder. Renaming its manifest into place makes it the current one. The old folder is removed when all ranks
have seen that."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.kinds import MANIFEST
from ballast.checkpoint.manifest import FOLDER, content_in, folder_in, rank_file
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.new_files import flush_folder, make_folder, require_own_folder, write_file, write_new
from ballast.sizes import human_size
from ballast.torch.parameters.units import names_in_model

log = logging.getLogger("ballast")
Written = tuple[int, int]  # offset in the file, and seal


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
            f"cannot save: another job has saved step {there['step']} here since this training saved or loaded",
            where=str(directory),
            needed="one job that saves to a directory",
            remedy="Stop the other job, or save to another directory. To resume from the checkpoint that is there, load "
            "it; to replace it, remove it first.",
        )


def require_space(directory: Path, needed: int) -> None:
    found = os.statvfs(directory)
    available = found.f_bavail * found.f_frsize
    if needed > available:
        fail(
            "drive_full",
            "cannot save a checkpoint: it does not fit on the drive",
            where=str(directory),
            needed=human_size(needed),
            available=human_size(available),
            remedy="Free space, or save to another drive. An existing checkpoint stays as it is.",
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

    directory: CheckpointDirectory
    folder: str
    content: Mapping[str, Any]  # the manifest without the ranks' indexes

    def is_complete(self) -> bool:
        """Return whether all ranks have written their files. The folder is listed, as a network file system may remember for
        a while that a name was not there."""
        return {rank_file(rank, "json") for rank in self._ranks}.issubset(os.listdir(self.directory.path / self.folder))

    def make_current(self) -> None:
        """Write the manifest, with the seals of all ranks' indexes as they are on the drive."""
        files = [rank_file(rank, "json") for rank in self._ranks]
        seals = [manifest.seal_of(manifest.read_bytes(self.directory.path / self.folder / file)) for file in files]
        indexes = [{"file": file, "seal": seal} for file, seal in zip(files, seals)]
        self.directory.make_current(self.folder, manifest.sealed({**self.content, "indexes": indexes}))

    @property
    def _ranks(self) -> range:
        return range(self.content["ranks"])


class Chunk(NamedTuple):
    """Consecutive elements of a tensor that a rank writes."""

    tensor: str
    first: int
    elements: int


class RankFiles:
    """The files of a rank while they are written, by one thread."""

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank = folder, rank
        self.writer = _core.CheckpointWriter(str(folder / rank_file(rank, "data")))

    def finish(self, chunks: Sequence[Chunk], written: Sequence[Written], extra: bytes) -> int:
        """Complete the files with the chunks that were written, and return the bytes of the data. The index gets its name last:
        where it is, all files of the rank are complete and on the drive."""
        bytes_written = self.writer.finish()
        write_file(self._folder / rank_file(self._rank, "extra"), extra)
        index = self._folder / rank_file(self._rank, "json")
        write_new(index, sealed_index(chunks, written, bytes_written, extra), 0o600)
        flush_folder(self._folder)
        return bytes_written


def sealed_index(chunks: Sequence[Chunk], written: Sequence[Written], bytes_written: int, extra: bytes) -> bytes:
    places: dict[str, list[tuple[int, int, int, str]]] = {}  # first element, count, offset and seal, by tensor
    for chunk, (offset, seal) in zip(chunks, written, strict=True):
        places.setdefault(chunk.tensor, []).append((chunk.first, chunk.elements, offset, f"{seal:016x}"))
    described = {"bytes": len(extra), "seal": manifest.seal_of(extra)}
    return manifest.sealed({"chunks": places, "data_bytes": bytes_written, "extra": described})
