"""Save a checkpoint: every rank writes its local shards, and then rank 0 writes the manifest, which makes the
checkpoint valid."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.agreement import Agreement
from ballast.checkpoint import contents, manifest
from ballast.checkpoint.contents import Checkpoint, Tensor
from ballast.checkpoint.folder import (
    CheckpointDirectory,
    flush_folder,
    folder_name,
    require_same_history,
    require_same_model,
    require_space,
    write_file,
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
from ballast.checkpoint.saving_part import SavingPart
from ballast.checkpoint.torch_tensors import TorchTensor, Writers
from ballast.checks import refuse
from ballast.wrapper.checkpoint_access import CheckpointAccess
from ballast.wrapper.collectives import by_first_rank
from ballast.wrapper.ungathered import plain

SLICE = 1 << 20  # elements of a chunk of torch's tensors; a multiple of the elements that share a scale
INDEX_BYTES = 128  # of a chunk's entry in a rank's index
SAVING = "saving a checkpoint"

Chunks = dict[str, list[tuple[int, int, int, str]]]  # by tensor: first element, count, offset, seal


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
        self._locked: CheckpointDirectory | None = None  # on rank 0, which locks the directory for all ranks

    def run(self) -> None:
        folder = folder_name(max(access.steps for access in self._accesses), self._token())
        try:
            by_first_rank(self._group, SAVING, lambda: self._enter(folder))
            self._begin(folder)
            self._write(self._directory / folder)
            with self._agreement.attempt():
                if self._locked is not None:
                    self._locked.make_current(folder, self._manifest(folder))
            self._agreement.settle()
            if self._locked is not None:
                self._locked.remove_stale()
        except BaseException:
            if self._locked is not None:
                self._locked.discard(folder)
            raise
        finally:
            if self._locked is not None:
                self._locked.release()

    def _enter(self, folder: str) -> None:
        """Lock the directory, and refuse to replace the checkpoint of another training."""
        self._locked = CheckpointDirectory(self._directory)
        require_same_model(self._directory, set(self._names.values()))
        known = checkpoints_in(self._accesses, self._directory)
        require_same_history(self._directory, known, of_this_training(self._accesses))
        # If this saving fails, either checkpoint may be the current one. The next saving may replace both.
        also_known = [name for name in (folder, manifest.folder_in(self._directory)) if name]
        know_checkpoints(self._accesses, self._directory, known.union(also_known))

    def _token(self) -> int:
        """Return a number that is the same on all ranks, and another one in every saving."""
        mine = int.from_bytes(os.urandom(4), "little") if self._group.rank == 0 else 0
        return self._group.all_reduce([mine])[0]

    def _begin(self, folder: str) -> None:
        with self._agreement.attempt():
            if self._locked is not None:
                self._locked.create(folder)
        self._agreement.settle()
        [needed] = self._group.all_reduce([self._bytes()])
        with self._agreement.attempt():
            require_shared(self._directory / folder)
            require_space(self._directory, needed)
        self._agreement.settle()

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

    def _bytes(self) -> int:
        sizes = [size for part in self._parts for size in part.sizes()]
        chunks = len(sizes)
        sizes += [held.tensor.element_size() * count for held, _, count in self._local_slices()]
        return sum(sizes) + INDEX_BYTES * chunks + len(self._extra)

    def _write(self, folder: Path) -> None:
        rank = self._group.rank
        chunks: Chunks = {}
        with self._agreement.attempt():
            writer = _core.CheckpointWriter(str(folder / contents.data_name(rank)))
        self._agreement.settle()

        def append(part: _core.StatePart, name: str, elements: tuple[int, int]) -> None:
            with self._agreement.attempt():
                if self._agreement.error is None:
                    add(chunks, name, *elements, writer.append(part))

        for saving in self._parts:
            saving.visit(append)
        with self._agreement.attempt():
            if self._agreement.error is None:
                read, tensor = None, torch.empty(0, device="cpu")
                for held, first, count in self._local_slices():
                    if held is not read:
                        read, tensor = held, held.read()
                    values = slice_on_host(tensor, first, count)
                    written = writer.append_memory(values.data_ptr(), values.nbytes)
                    add(chunks, held.name, held.begin + first, count, written)
                bytes_written = writer.finish()
                write_file(folder / contents.extra_name(rank), self._extra)
                write_file(folder / contents.index_name(rank), sealed_index(chunks, bytes_written, self._extra))
                flush_folder(folder)
        self._agreement.settle()

    def _manifest(self, folder: str) -> bytes:
        """Return the manifest, with the seals of all ranks' indexes as they are on the drive."""
        files = [contents.index_name(rank) for rank in range(self._group.size)]
        seals = [manifest.seal_of(manifest.read_bytes(self._directory / folder / file)) for file in files]
        checkpoint = Checkpoint(
            ranks=self._group.size,
            folder=folder,
            optimizers=[part.saved() for part in self._parts],
            tensors=self._entries,
            indexes=[{"file": file, "seal": seal} for file, seal in zip(files, seals)],
        )
        return manifest.sealed(checkpoint.to_json())


def sealed_index(chunks: Chunks, bytes_written: int, extra: bytes) -> bytes:
    """Return the content of a rank's index."""
    of_extra = {"bytes": len(extra), "seal": manifest.seal_of(extra)}
    return manifest.sealed({"chunks": chunks, "data_bytes": bytes_written, "extra": of_extra})


def add(chunks: Chunks, name: str, first: int, count: int, written: tuple[int, int]) -> None:
    offset, seal = written
    chunks.setdefault(name, []).append((first, count, offset, f"{seal:016x}"))


def slice_on_host(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return plain(tensor).reshape(-1)[first : first + count].to("cpu").contiguous()


def require_shared(folder: Path) -> None:
    if not folder.is_dir():
        refuse(
            "cannot save a checkpoint: not all ranks see the directory",
            where=str(folder),
            needed="a directory that all machines share",
        )


def packed(extra: Any) -> bytes:
    """Serialize `extra`, and refuse values that cannot be read again without running code that the file names."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        refuse(
            "cannot save extra: torch.load(weights_only=True) cannot read it",
            where=str(error).splitlines()[0],
            needed="tensors, numbers, text, None, and lists, tuples and dictionaries of them",
            remedy="Save a state_dict() instead of an object.",
        )
    return buffer.getvalue()
