"""Describe this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast import _core

if TYPE_CHECKING:
    from ballast._core import MachineFound


def this_machine(*, root: str = "/") -> MachineFound:
    """Return the cores, the memory with its limits and the GPUs of this process, and whether NCCL can be used.

    `root` replaces the folder with /proc and /sys, for tests.

    >>> found = this_machine()
    >>> found["cores"] >= 1 and found["memory"]["total_bytes"] > 0
    True
    """
    return _core.this_machine(root=root)


def available_memory(machine: MachineFound) -> int:
    """Return the bytes of host memory that this process may still allocate."""
    memory, limits = machine["memory"], machine["memory"]["cgroup"]
    return memory["available_bytes"] if limits is None else min(memory["available_bytes"], limits["available_bytes"])
