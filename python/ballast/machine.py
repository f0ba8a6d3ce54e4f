"""What this process was given to work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast import _core

if TYPE_CHECKING:
    from ballast._core import MachineFound


def this_machine(*, root: str = "/") -> MachineFound:
    """Cores, memory with its limits, GPUs, and whether this build has NCCL, for several of them. `root` is another place to
    find /proc and /sys in, for tests.

    >>> found = this_machine()
    >>> found["cores"] >= 1 and found["memory"]["total_bytes"] > 0
    True
    """
    return _core.this_machine(root=root)
