"""Write a checkpoint from a snapshot while the training continues.

Each rank writes its own files in a thread. That of rank 0 then makes the checkpoint the current one, as soon as the folder has
the files of all ranks. These threads use no collective operations: those belong to the thread that trains. A rank that fails
leaves no index, so the checkpoint stays incomplete until all ranks agree that it has failed (see PendingSave)."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ballast import _core
from ballast.checkpoint.folder import Chunk, Commit, RankFiles
from ballast.checkpoint.inventory import SAVING
from ballast.errors import Error
from ballast.ranks import Agreement, Group, begin_exit

log = logging.getLogger("ballast")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two looks at the folder

# Rank 0 waits so long for the files of other ranks when it exits, or when the group is broken: they write about as long as it
# did, and a rank that was killed writes none.
LEAST_PATIENCE = 30.0  # seconds


class SnapshotFiles(NamedTuple):
    """What a rank writes, and where."""

    folder: Path
    rank: int
    snapshot: _core.Snapshot
    chunks: Sequence[Chunk]
    extra: bytes


class BackgroundSave:
    """The thread of a rank that writes its files. Rank 0 has a commit, and makes the checkpoint the current one. The thread
    holds nothing of the training. The interpreter waits for it at exit."""

    def __init__(self, files: SnapshotFiles, commit: Commit | None):
        self.bytes = files.snapshot.bytes
        self._files: SnapshotFiles | None = files
        self._commit = commit
        self._error: Exception | None = None
        self._has_written = threading.Event()
        self._decision: bool | None = None  # of all ranks: whether their files are complete
        self._is_decided = threading.Event()
        self._has_lost_ranks = False
        self._is_exiting = False
        self._thread = threading.Thread(target=self._run, name="ballast-save")

    # --- For the thread that trains ---

    def start(self) -> None:
        """Start to write. A failure is one of the save, and raise_error() raises it."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread for it
            self._error = error
            self._release_snapshot()
            self._has_written.set()

    @property
    def has_ended(self) -> bool:
        return self._has_written.is_set() and not self._thread.is_alive()

    def wait_for_own_files(self) -> None:
        """Return when this rank has written its files, or has failed to."""
        self._has_written.wait()

    def decide(self, complete: bool) -> None:
        """Tell this rank whether the files of all ranks are complete. On rank 0, return when the checkpoint is the current one,
        or has been removed."""
        self._decision = complete
        self._is_decided.set()
        if self._thread.ident is None:
            self._conclude(began=time.monotonic())
        else:
            self._thread.join()

    def lose_ranks(self) -> None:
        """Tell rank 0 that the ranks cannot decide any more. What they write still counts, if it is there soon."""
        self._has_lost_ranks = True

    def raise_error(self) -> None:
        """Raise the error of the thread, if there is one that was not raised yet."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # which would keep this frame alive, and this frame it

    # --- The thread ---

    def _run(self) -> None:
        began = time.monotonic()
        with self._keeping_error():
            self._write()
        self._release_snapshot()
        self._has_written.set()
        self._conclude(began)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep an error for raise_error(), without the frames that it has passed: they hold the snapshot."""
        try:
            yield
        except Exception as error:
            unknown = None if isinstance(error, (Error, OSError)) else error
            log.error("saving a checkpoint failed: %s", error, exc_info=unknown)
            if self._error is None:
                self._error = error.with_traceback(None)

    def _release_snapshot(self) -> None:
        assert self._files is not None
        self._files.snapshot.release()
        self._files = None

    def _write(self) -> None:
        assert self._files is not None
        folder, rank, snapshot, chunks, extra = self._files
        files = RankFiles(folder, rank)
        written = []
        for number in range(len(chunks)):
            written.append(files.writer.append_chunk(snapshot, number))
            self._look_for_exit()
        files.finish(chunks, written, extra)

    def _conclude(self, began: float) -> None:
        """Make the checkpoint the current one when it is complete, or remove it when all ranks know that it failed."""
        if self._commit is None:
            return
        with self._keeping_error():
            try:
                if self._becomes_complete(self._commit, patience=max(LEAST_PATIENCE, time.monotonic() - began)):
                    self._commit.make_current()
                    self._commit.directory.remove_stale()
            except BaseException:
                self._decision = False
                raise
            finally:
                if self._decision is False:
                    self._commit.directory.discard(self._commit.folder)
                self._commit.directory.release()

    def _becomes_complete(self, commit: Commit, patience: float) -> bool:
        pause, deadline = SHORTEST_PAUSE, None
        while self._decision is None:
            if self._error is None and commit.is_complete():
                return True
            if self._look_for_exit() or self._has_lost_ranks:
                if deadline is None:
                    deadline = time.monotonic() + patience
                    log.info("waiting for the files of other ranks in %s, for at most %.0f s", commit.folder, patience)
                if self._error is not None or time.monotonic() > deadline:
                    log.warning("%s stays incomplete: not all ranks have written their files", commit.folder)
                    return False
            self._is_decided.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self._decision

    def _look_for_exit(self) -> bool:
        """Return whether the interpreter exits. It waits for this thread before it tells other ranks about an uncaught
        exception, so this thread tells them."""
        if not self._is_exiting and not threading.main_thread().is_alive():
            self._is_exiting = True
            begin_exit()
        return self._is_exiting


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
        with agreement.settled():
            self._save.decide(complete=True)
            self._save.raise_error()
        for do in self._last_steps:
            do()
