"""Tell a run where its newest checkpoint is: an error names it if records of the run are lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ballast.checkpoint.folder import flush_folder, write_file
from ballast.checkpoint.kinds import run_folder
from ballast.torch.training.checkpoint_access import CheckpointAccess

log = logging.getLogger("ballast")

NAME = "newest-checkpoint"  # offload/FORMAT.md describes the file


def tell_run(access: CheckpointAccess, directory: Path) -> None:
    """Write the step and the directory to this rank's folder of the run, if there is a run."""
    notice_for_run(access, directory)()


def notice_for_run(access: CheckpointAccess, directory: Path) -> Callable[[], None]:
    """Return what tells the run later that the directory has a checkpoint of the step that is the last one now."""
    options = access.options
    if not options.run:
        return lambda: None
    folder = Path(options.directories[0], run_folder(options.run, access.group.rank))
    return partial(_write, folder, f"{access.steps} {os.path.realpath(directory)}\n".encode())


def _write(folder: Path, notice: bytes) -> None:
    unfinished = folder / f"{NAME}.unfinished"
    try:
        unfinished.unlink(missing_ok=True)  # left by a killed process
        write_file(unfinished, notice)
        os.replace(unfinished, folder / NAME)
        flush_folder(folder)
    except OSError as error:  # the checkpoint is there all the same
        log.warning("the run does not know its newest checkpoint: %s", error)
