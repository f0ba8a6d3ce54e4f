"""Create files that are on the drive when a call returns, where other users may have left files and links of the
same names, and write the files of reports: all of a file or nothing. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from ballast.checks import fail, refuse


def write_new(path: Path, content: bytes) -> None:
    """Replace a file, or a link, by a file with this content: all of it or nothing. It is on the drive when this returns. What
    a killed process or another user has left with the name of the unfinished one is removed, and no link is followed."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def require_no_link(path: Path) -> None:
    """Raise B2206 for a link, which a program that opens the file would follow."""
    if path.is_symlink():
        fail("foreign_file", "cannot write there: it is a link", where=str(path))


def output_path(option: str, given: str, suffix: str) -> Path:
    """Return the path of a file to write. Refuse it now if its name has another suffix or it cannot be written, before a
    search takes time."""
    path = Path(given)
    if path.suffix.lower() != suffix:
        refuse(f"cannot write {given}: {option} writes {suffix} files only", needed=f"a name that ends with {suffix}")
    if path.is_dir():
        refuse(f"cannot write {given}: it is a directory", needed="the name of a file")
    if not path.parent.is_dir():
        refuse(f"cannot write {given}: there is no directory {path.parent}", remedy="Create the directory first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        refuse(f"cannot write {given}: this process may not create files in {path.parent}", needed="write permission there")
    return path


def write_output(path: Path, text: str) -> None:
    """Replace a file atomically."""
    target = Path(os.path.realpath(path))  # a link stays, and what it names is replaced
    try:
        write_new(target, text.encode())
    except OSError as error:
        fail("file_call", f"cannot write {path}: {error.strerror}", where=str(target))
