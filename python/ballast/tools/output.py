"""Write a file of a report: all of it or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ballast import _core
from ballast.checks import fail, refuse
from ballast.new_files import write_new


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


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    target = Path(os.path.realpath(path))  # a link stays, and what it names is replaced
    try:
        write_new(target, text.encode())
    except OSError as error:
        fail("file_call", _core.Problem(what=f"cannot write {path}: {error.strerror}", where=str(target)))
