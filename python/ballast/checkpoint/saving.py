"""Save a checkpoint: every rank writes its local shards, and then rank 0 writes the manifest, which makes the
checkpoint valid."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ballast import _core
from ballast.agreement import Agreement
from ballast.checkpoint import manifest
from ballast.checkpoint.background import BackgroundSave, SnapshotFiles
from ballast.checkpoint.commit import Commit
from ballast.checkpoint.contents import Checkpoint, Tensor
from ballast.checkpoint.folder import (
    CheckpointDirectory,
    folder_name,
    require_same_history,
    require_same_model,
    require_space,
)
from ballast.checkpoint.inventory import (
    checkpoints_in,
    entry_of,
    know_checkpoints,
    of_this_training,
    parameter_names,
    torch_tensors,
)
from ballast.checkpoint.outer_state import outer_tensors
from ballast.checkpoint.pieces import slices
from ballast.checkpoint.rank_files import Chunk, RankFiles
from ballast.checkpoint.saving_part import SavingPart
from ballast.checkpoint.snapshot_memory import has_much_memory, require_memory
from ballast.checkpoint.torch_tensors import TorchTensor, Writers
from ballast.checks import refuse
from ballast.torch.collectives import by_first_rank
from ballast.torch.parameters.placeholder import slice_on_host
from ballast.torch.training.checkpoint_access import CheckpointAccess

SLICE = 1 << 20  # elements of a chunk of torch's tensors; a multiple of the elements that share a scale
INDEX_BYTES = 128  # of a chunk's entry in a rank's index
SAVING = "saving a checkpoint"

Result = TypeVar("Result", covariant=True)


class Sink(Protocol[Result]):
    """Takes the chunks of a rank, one after the other: the writer of a file, or a snapshot."""

    def append(self, part: _core.StatePart) -> Result: ...
    def append_memory(self, address: int, bytes: int) -> Result: ...


class Saving:
    """Saves one rank's part of one checkpoint. All ranks do this together."""

    def __init__(self, directory: Path, model: torch.nn.Module, accesses: Sequence[CheckpointAccess], extra: Any):
        self._directory = directory
        self._accesses = accesses
        self._group = accesses[0].group
        self._parts = [SavingPart(access) for access in accesses]
        self._names = parameter_names(model, accesses)
        self._agreement = Agreement(self._group, SAVING)
        with self._agreement.attempt():
            for part in self._parts:
                part.check(self._names)
            self._extra = packed(extra)
        self._agreement.settle()
        partitions = [part.partition for part in self._parts]
        self._torch_tensors = list(torch_tensors(model, accesses, partitions))
        for access, partition in zip(accesses, partitions):
            self._torch_tensors += outer_tensors(access, partition, self._names)
        self._entries: dict[str, Tensor] = {}
        for part in self._parts:
            part.look()
            self._entries.update(part.entries)
        self._entries.update((held.name, entry_of(held)) for held in self._torch_tensors)
        self._chunks: list[Chunk] = []  # that this rank has given to a sink
        self._locked: CheckpointDirectory | None = None  # on rank 0, which locks the directory for all ranks

    def run(self) -> None:
        """Save, and return when the checkpoint is the current one."""
        folder = self._name_folder(waits=True)
        try:
            self._begin(folder)
            self._write(self._directory / folder)
            with self._agreement.attempt():
                if (commit := self._commit(folder)) is not None:
                    commit.make_current()
            self._agreement.settle()
            if self._locked is not None:
                self._locked.remove_stale()
        except BaseException:
            self._abandon(folder)
            raise
        if self._locked is not None:
            self._locked.release()

    def copy(self) -> BackgroundSave:
        """Copy what this rank saves to the host's memory. Return what writes it, and makes the checkpoint the current one."""
        folder = self._name_folder(waits=False)
        try:
            self._begin(folder)
            snapshot = self._snapshot()
            files = SnapshotFiles(self._directory / folder, self._group.rank, snapshot, self._chunks, self._extra)
            return BackgroundSave(files, self._commit(folder))
        except BaseException:
            self._abandon(folder)
            raise

    def _name_folder(self, waits: bool) -> str:
        """Return the same name on all ranks, and another one in every saving."""
        mine = int.from_bytes(os.urandom(4), "little") if self._group.rank == 0 else 0
        token, waiting = self._group.all_reduce([mine, int(waits)])
        if 0 < waiting < self._group.size:
            refuse("cannot save a checkpoint: some ranks wait for it, and others do not", needed="the same wait= on all ranks")
        return folder_name(max(access.steps for access in self._accesses), token)

    def _begin(self, folder: str) -> None:
        by_first_rank(self._group, SAVING, lambda: self._enter(folder))
        with self._agreement.attempt():
            if self._locked is not None:
                self._locked.create(folder)
        self._agreement.settle()
        sizes = self._sizes()
        [needed] = self._group.all_reduce([sum(sizes) + INDEX_BYTES * len(sizes) + len(self._extra)])
        with self._agreement.attempt():
            require_shared(self._directory / folder)
            require_space(self._directory, needed)
        self._agreement.settle()

    def _enter(self, folder: str) -> None:
        """Lock the directory, and refuse to replace the checkpoint of another training."""
        self._locked = CheckpointDirectory(self._directory)
        require_same_model(self._directory, set(self._names.values()))
        known = checkpoints_in(self._accesses, self._directory)
        require_same_history(self._directory, known, of_this_training(self._accesses))
        # If this saving fails, either checkpoint may be the current one. The next saving may replace both.
        also_known = [name for name in (folder, manifest.folder_in(self._directory)) if name]
        know_checkpoints(self._accesses, self._directory, known.union(also_known))

    def _abandon(self, folder: str) -> None:
        if self._locked is not None:
            try:
                self._locked.discard(folder)
            finally:
                self._locked.release()

    def _commit(self, folder: str) -> Commit | None:
        """Return what makes the folder the current checkpoint; nothing on other ranks than 0. It has a copy of all that it
        needs."""
        if self._locked is None:
            return None
        optimizers = [part.saved() for part in self._parts]
        checkpoint = Checkpoint(self._group.size, folder, optimizers, self._entries, indexes=[])
        return Commit(self._locked, folder, checkpoint.to_json())

    # --- The part of this rank ---

    def _local_slices(self) -> Iterator[tuple[TorchTensor, int, int]]:
        """Yield the slices of torch's tensors that this rank writes."""
        number = 0
        for held in self._torch_tensors:
            for first, count in slices(held.tensor.numel(), SLICE):
                number += held.writers is Writers.in_turns
                turn = number % self._group.size if held.writers is Writers.in_turns else 0
                if held.writers is Writers.each or turn == self._group.rank:
                    yield held, first, count

    def _sizes(self) -> list[int]:
        """Return the bytes of each chunk that this rank writes, in their order."""
        sizes = [size for part in self._parts for size in part.sizes()]
        return sizes + [held.tensor.element_size() * count for held, _, count in self._local_slices()]

    def _give_to(self, sink: Sink[Result]) -> list[Result]:
        """Read what this rank saves, and return what the sink returns for each chunk. All ranks call this together; a rank with
        an error, which the next agreement finds, reads on with the others."""
        results: list[Result] = []

        def append(part: _core.StatePart, name: str, elements: tuple[int, int]) -> None:
            with self._agreement.attempt():
                if self._agreement.error is None:
                    results.append(sink.append(part))
                    self._chunks.append(Chunk(name, *elements))

        for saving in self._parts:
            saving.visit(append)
        with self._agreement.attempt():
            if self._agreement.error is None:
                read, tensor = None, torch.empty(0, device="cpu")
                for held, first, count in self._local_slices():
                    if held is not read:
                        read, tensor = held, held.read()
                    values = slice_on_host(tensor, first, count)
                    results.append(sink.append_memory(values.data_ptr(), values.nbytes))
                    self._chunks.append(Chunk(held.name, held.begin + first, count))
        return results

    def _write(self, folder: Path) -> None:
        with self._agreement.attempt():
            files = RankFiles(folder, self._group.rank)
        self._agreement.settle()
        written = self._give_to(files.writer)
        with self._agreement.attempt():
            if self._agreement.error is None:
                files.finish(self._chunks, written, self._extra)
        self._agreement.settle()

    def _snapshot(self) -> _core.Snapshot:
        """Copy what this rank saves, into the memory of the last copy if that is still there."""
        sizes, keeper = self._sizes(), self._accesses[0]
        last, keeper.snapshot = keeper.snapshot, None
        if last is not None and not (last.has_sizes(sizes) and has_much_memory(self._group, last.bytes)):
            last = None
        require_memory(self._group, sum(sizes))
        with self._agreement.attempt():
            snapshot = last or _core.Snapshot(sizes, threads=keeper.options.threads)
        self._agreement.settle()
        self._give_to(snapshot)
        self._agreement.settle()
        keeper.snapshot = snapshot
        return snapshot


def require_shared(folder: Path) -> None:
    if not folder.is_dir():
        refuse(
            "cannot save a checkpoint: not all ranks see the directory",
            where=str(folder),
            needed="a directory that all machines share",
        )


def packed(extra: Any) -> bytes:
    """Serialize `extra`, and refuse values that cannot be read again without running code that the file names."""
    buffer, what = io.BytesIO(), "torch.save() cannot write it"
    try:
        torch.save(extra, buffer)
        what = "torch.load(weights_only=True) cannot read it"
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        refuse(
            f"cannot save extra: {what}",
            where=(str(error).splitlines() or [type(error).__name__])[0],
            needed="tensors, numbers, text, None, and lists, tuples and dictionaries of them",
            remedy="Save a state_dict() instead of an object.",
        )
    return buffer.getvalue()
