"""Examine a directory for the state on drives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ballast import _core
from ballast.diagnostic import Diagnostic, bad, good, note
from ballast.errors import Error
from ballast.sizes import human_size

if TYPE_CHECKING:
    from ballast._core import DriveFound

PROBE = 64 << 20  # bytes that are written and read
LITTLE_SPACE = 64 << 30
SLOW = 1e9  # bytes a second


def look_at(folder: str) -> Iterator[Diagnostic]:
    """Measure a directory, which takes about a second."""
    try:
        drive = _core.inspect_drive(folder, bytes=PROBE)
    except Error as error:
        yield bad("drive", f"{folder}: {error.what_happened}", error.remedy)
        return
    yield from judge(folder, drive)


def judge(folder: str, drive: DriveFound) -> Iterator[Diagnostic]:
    """Turn the measurements of a directory into diagnostics."""
    system, free = drive["file_system"], drive["free_bytes"]
    if drive["is_network"]:
        yield bad("drive", f"{folder} is on a network file system ({system})", "Use a directory on a local drive.")
    elif system == "tmpfs":
        yield bad("drive", f"{folder} is in memory ({system})", "Use a directory on a drive.")
    else:
        yield good("drive", f"{folder} is on {system}")
    if free < LITTLE_SPACE:
        remedy = "Optimizer state takes 24 bytes per parameter on a drive (format split). Free space, or use another drive."
        yield note("space", f"{human_size(free)} free", remedy)
    else:
        yield good("space", f"{human_size(free)} free")
    if drive["buffered_because"]:
        remedy = "Use ext4 or xfs on the drive itself, not an overlay: the page cache costs memory and time."
        yield note("direct", f"no direct I/O: {drive['buffered_because']}", remedy)
    else:
        yield good("direct", "direct I/O works")
    speed = f"read {drive['read'] / 1e9:.2f}, write {drive['write'] / 1e9:.2f}, both {drive['both'] / 1e9:.2f} GB/s"
    if drive["both"] < SLOW:
        yield note("speed", speed, "Local NVMe drives are faster. Plan with these rates first: ballast plan --rate read=1GB/s.")
    else:
        yield good("speed", speed)
