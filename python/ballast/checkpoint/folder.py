"""The directory of a checkpoint: a manifest, and beside it a folder with the files that it names. A new checkpoint gets a
folder of its own; renaming its manifest into place makes it the current one. The old folder goes when all ranks have seen
that."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ballast import _core
from ballast.checkpoint.manifest import MANIFEST, read_bytes, unsealed
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.sizes import human_size
from ballast.wrapper.plain import own_names

FOLDER = re.compile(r"step-\d+-[0-9a-f]{8}")


def folder_name(step: int, token: int) -> str:
    """
    >>> folder_name(12, 255)
    'step-12-000000ff'
    """
    return f"step-{step}-{token:08x}"


def make_folder(directory: Path, name: str) -> None:
    """And takes away what savings left that were stopped."""
    directory.mkdir(parents=True, exist_ok=True)
    flush_folder(directory.parent)
    try:
        remove_folders(directory, but=current_folder(directory))
    except Error:
        pass  # a manifest that cannot be read is no reason not to save; until that is done everything stays
    (directory / name).mkdir(mode=0o700)


def current_folder(directory: Path) -> str:
    """Of the checkpoint that is there; empty where there is none."""
    path = directory / MANIFEST
    if not path.exists():
        return ""
    return str(unsealed(read_bytes(path), str(path))["folder"])


def require_same_model(directory: Path, names: Collection[str]) -> None:
    """Refuses to replace a checkpoint none of whose tensors has one of these names: two models would take each other's away."""
    path = directory / MANIFEST
    try:
        there = unsealed(read_bytes(path), str(path)).get("tensors", {}) if path.exists() else {}
    except Error:
        return  # as in make_folder()
    if there and not any(own in names for own in own_names(there.keys(), names).values()):
        refuse(
            "a checkpoint of another model would be replaced: no tensor of it has the name of one of this model",
            where=str(directory),
            needed="a directory for each model, and for each part of one that ranks have apart",
            available=f"one with {next(iter(there))}",
            remedy="Save to another directory, or remove the checkpoint that is there.",
        )


def remove_folders(directory: Path, *, but: str) -> None:
    for path in directory.iterdir():
        if FOLDER.fullmatch(path.name) and path.name != but:
            shutil.rmtree(path, ignore_errors=True)


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


def make_current(directory: Path, folder: str, manifest: bytes) -> None:
    """Whoever reads the directory finds the old checkpoint before, and the new one afterwards."""
    flush_folder(directory / folder)
    flush_folder(directory)
    written = directory / folder / MANIFEST
    write_file(written, manifest)
    os.replace(written, directory / MANIFEST)
    flush_folder(directory)


def take_back(directory: Path, folder: str) -> None:
    """What a saving that failed has written; unless the manifest named it already: then nothing else is whole."""
    try:
        if current_folder(directory) != folder:
            shutil.rmtree(directory / folder, ignore_errors=True)
    except (Error, OSError):
        pass  # a manifest that cannot be read may name it
