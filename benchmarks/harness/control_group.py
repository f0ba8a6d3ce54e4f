"""A control group of the kernel, of version 1 or 2, which limits what processes use together. It needs root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class ControlGroup:
    """A group as a context, in which processes enter it. All of them must have ended before the context does."""

    def __init__(self, name: str, first: str, second: str, root: Path = Path("/sys/fs/cgroup")):
        """`first` and `second` are the names of what it limits, its controller, in both versions."""
        self.is_first = (root / first).is_dir()
        self._parent, self._controller = (root / first if self.is_first else root), second
        self.folder = self._parent / f"ballast-{name}-{os.getpid()}"

    def __enter__(self) -> ControlGroup:
        if not self.is_first:
            (self._parent / "cgroup.subtree_control").write_text(f"+{self._controller}")
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.rmdir()

    def limit(self, first: Mapping[str, object], second: Mapping[str, object]) -> None:
        """Write limits into files of these names, in their order."""
        for name, value in (first if self.is_first else second).items():
            (self.folder / name).write_text(str(value))

    def enter(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text("0")
