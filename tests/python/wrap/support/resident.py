"""The resident memory of this process as the kernel counts it, in bytes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def resident() -> int:
    """Return the resident memory now."""
    return _of_status("VmRSS")


def peak_resident(*, begin: bool = False) -> int:
    """Return the peak since the last call with `begin`."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmHWM")


def _of_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


@contextmanager
def memory_groups(count: int) -> Iterator[list[Path]]:
    """Make control groups whose memory can be limited, below that of this process; none where the system does not permit it."""
    groups = [each / f"ballast-test-{os.getpid()}-{number}" for each in _parent_of_groups() for number in range(count)]
    try:
        for group in groups:
            group.mkdir()
        yield groups if all(_limit_of(group).exists() for group in groups) else []
    except PermissionError:
        yield []
    finally:
        for group in groups:
            with suppress(FileNotFoundError):
                group.rmdir()


def enter_group(group: Path, most: int) -> None:
    """Move this process into the group, whose processes are killed when their memory from now on is more than this."""
    _limit_of(group).write_text(str(most))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _parent_of_groups() -> list[Path]:
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    version_1 = [of for _, controllers, of in lines if "memory" in controllers.split(",")]
    version_2 = [of for _, controllers, of in lines if not controllers]
    mount = "/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup"
    parents = [Path(mount, of.lstrip("/")) for of in version_1 or version_2]
    return [each for each in parents if os.access(each, os.W_OK)]


def _limit_of(group: Path) -> Path:
    of_version_1 = group / "memory.limit_in_bytes"
    return of_version_1 if of_version_1.exists() else group / "memory.max"
