"""Make a new folder the current checkpoint of its directory. Rank 0 does this for all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ballast.checkpoint import contents, manifest
from ballast.checkpoint.folder import CheckpointDirectory


@dataclass(frozen=True)
class Commit:
    """A folder to which ranks write, and what its manifest will say. The directory is locked."""

    directory: CheckpointDirectory
    folder: str
    content: Mapping[str, Any]  # of the manifest, apart from the ranks' indexes

    def is_complete(self) -> bool:
        """Return whether all ranks have written their files. The folder is listed, as a network file system may remember for
        a while that a name was not there."""
        return {contents.index_name(rank) for rank in self._ranks}.issubset(os.listdir(self.directory.path / self.folder))

    def make_current(self) -> None:
        """Write the manifest, with the seals of all ranks' indexes as they are on the drive."""
        files = [contents.index_name(rank) for rank in self._ranks]
        seals = [manifest.seal_of(manifest.read_bytes(self.directory.path / self.folder / file)) for file in files]
        indexes = [{"file": file, "seal": seal} for file, seal in zip(files, seals)]
        self.directory.make_current(self.folder, manifest.sealed({**self.content, "indexes": indexes}))

    @property
    def _ranks(self) -> range:
        return range(self.content["ranks"])
