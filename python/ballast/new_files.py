"""Create files and folders that are on the drive when a call returns, where other users may have left files and links of the
same names. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from ballast import _core
from ballast.checks import fail

ROOT = 0


def create(path: Path, mode: int = 0o600) -> int:
    """Create a file, and return its handle. What has its name, left by a killed process or by another user, is removed, and
    no link is followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, which is on the drive when this returns."""
    with open(create(path, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file, or a link, by a file with this content: all of it or nothing."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        write_file(unfinished, content, mode)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


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


def require_no_link(path: Path) -> None:
    """Raise B2206 for a link, which a program that opens the file would follow."""
    if path.is_symlink():
        fail_foreign(path, "it is a link")


def require_own_folder(folder: Path) -> None:
    """Raise B2206 if the folder belongs to another user. Root's folders, and all folders for root, may be used: in a container
    the folders of its host belong to others."""
    owner, own = folder.stat().st_uid, os.geteuid()
    if own != ROOT and owner not in (own, ROOT):
        fail_foreign(folder, f"it belongs to user {owner}, not to {own}")


def fail_foreign(path: Path, why: str) -> NoReturn:
    fail("foreign_file", _core.Problem(what=f"cannot write there: {why}", where=str(path)))
