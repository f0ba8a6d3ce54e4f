"""Save now or in the background, and follow what is being written there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ballast.agreement import Agreement
from ballast.checkpoint.background import BackgroundSave
from ballast.checkpoint.host_folders import folder_to_save, others_remover
from ballast.checkpoint.run_notice import notice_for_run
from ballast.checkpoint.saving import SAVING, Saving
from ballast.connecting import Group
from ballast.errors import Error
from ballast.torch.training.checkpoint_access import CheckpointAccess


class PendingSave:
    """A checkpoint that is being written while the training continues: `ballast.save(..., wait=False)` returns it.

    It becomes the current checkpoint as soon as all ranks have written their files, without another call."""

    def __init__(self, path: Path, group: Group, save: BackgroundSave, last_steps: Sequence[Callable[[], None]]):
        self._path = path
        self._group: Group | None = group  # None: all ranks know how the save has ended
        self._save = save
        self._last_steps = last_steps  # of this rank, when it is the current checkpoint
        self._failure: BaseException | None = None
        save.start()

    @property
    def path(self) -> Path:
        """The directory of the checkpoint, as it was given to `save()`."""
        return self._path

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of host memory for the copy of this rank's shards. It is kept for the next copy, but the kernel may take it
        as soon as this one is written."""
        return self._save.bytes

    @property
    def done(self) -> bool:
        """Whether this rank has written its files or has failed to; on rank 0, whether the checkpoint is the current one or has
        failed. Other ranks may still write."""
        return self._save.has_ended

    @property
    def is_settled(self) -> bool:
        """Whether wait() has returned or raised: all ranks know whether this is the current checkpoint."""
        return self._group is None

    def wait(self) -> None:
        """Return when this is the current checkpoint. All ranks call this together, between steps.

        Raise what went wrong, as `save(wait=True)` does: the error of this rank, or B3301 with the ranks that failed. The
        training is not affected, and the checkpoint before stays the current one.
        """
        if self._group is not None:
            self._save.wait_for_own_files()
            group, self._group = self._group, None
            try:
                self._settle(Agreement(group, SAVING))
            except BaseException as error:
                self._failure = copy.copy(error)  # without its frames
                raise
        elif self._failure is not None:
            raise copy.copy(self._failure)

    def _settle(self, agreement: Agreement) -> None:
        with agreement.attempt():
            self._save.raise_error()
        try:
            agreement.settle()
        except Error:
            if agreement.has_failed:
                self._save.decide(complete=False)
            else:  # a rank is lost, and its files may be complete
                self._save.lose_ranks()
            raise
        with agreement.attempt():
            self._save.decide(complete=True)
            self._save.raise_error()
        agreement.settle()
        for do in self._last_steps:
            do()


def save_now(directory: Path, model: torch.nn.Module, accesses: Sequence[CheckpointAccess], extra: Any) -> None:
    """Save, and return when the checkpoint is the current one. All ranks call this together."""
    last_steps = last_steps_of(directory, accesses)
    Saving(folder_to_save(directory, accesses[0]), model, accesses, extra).run()
    for do in last_steps:
        do()


def save_in_background(
    directory: Path, model: torch.nn.Module, accesses: Sequence[CheckpointAccess], extra: Any
) -> PendingSave:
    """Copy what is saved, and start to write it. All ranks call this together."""
    path = directory.absolute()  # the program may go to another folder meanwhile
    copied = Saving(folder_to_save(path, accesses[0]), model, accesses, extra).copy()
    pending = PendingSave(path, accesses[0].group, copied, last_steps_of(path, accesses))
    for access in accesses:
        access.pending = pending
    return pending


def last_steps_of(directory: Path, accesses: Sequence[CheckpointAccess]) -> list[Callable[[], None]]:
    """Return what each rank does when the directory has the checkpoint of this step. It holds nothing of the training."""
    return [*(notice_for_run(access, directory) for access in accesses), others_remover(directory, accesses[0])]
