"""The resident memory of this process as the kernel counts it, in bytes."""

from pathlib import Path


def resident() -> int:
    """Return the resident memory now."""
    return _of_status("VmRSS")


def peak_resident(*, begin: bool = False) -> int:
    """Return the peak since the last call with `begin`."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmHWM")


def proportional() -> int:
    """Return the resident memory now, with the share of this process of pages that others map too."""
    return _of_status("Pss", "smaps_rollup")


def _of_status(field: str, file: str = "status") -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
