"""Save a checkpoint: every rank writes its local shards, and then rank 0 writes the manifest, which makes the
checkpoint valid."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
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
    entry_of_member,
    of_this_training,
    parameter_names,
    require_all_partitioned,
    torch_tensors,
)
from ballast.checkpoint.outer_state import outer_tensors
from ballast.checkpoint.pieces import slices
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

    def __init__(self, directory: Path, model: torch.nn.Module, access: CheckpointAccess, extra: Any):
        self._directory = directory
        self._access = access
        self._group = access.group
        self._partition = access.partition_now()
        self._partition.require_not_updated("cannot save the model")
        self._names = parameter_names(model, access)
        self._agreement = Agreement(self._group, SAVING)
        with self._agreement.attempt():
            access.require_not_gathered("cannot save a checkpoint")
            self._partition.require_not_cast()
            require_all_partitioned(access, self._names)
            self._extra = packed(extra)
            self._groups = groups_of(access.optimizer, self._names)
        self._agreement.settle()
        self._torch_tensors = list(torch_tensors(model, access, self._partition))
        self._torch_tensors += outer_tensors(access, self._partition, self._names)
        self._entries = {
            self._names[id(member.parameter)]: entry_of_member(member, self._partition, access)
            for member in self._partition.all_members
        }
        self._entries.update((held.name, entry_of(held)) for held in self._torch_tensors)
        self._local_parts = [part for number, part in enumerate(self._partition.local_shards()) if self._writes(number)]
        self._locked: CheckpointDirectory | None = None  # on rank 0, which locks the directory for all ranks

    def run(self) -> None:
        folder = folder_name(self._access.steps, self._token())
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
        known = checkpoints_in(self._access, self._directory)
        require_same_history(self._directory, known, of_this_training(self._access))
        # If this saving fails, either checkpoint may be the current one. The next saving may replace both.
        known.update(name for name in (folder, manifest.folder_in(self._directory)) if name)

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

    def _writes(self, number: int) -> bool:
        """Return whether this rank writes this shard. In stage 0 all ranks keep all shards, so they take turns."""
        return self._access.options.stage != 0 or number % self._group.size == self._group.rank

    def _local_slices(self) -> Iterator[tuple[TorchTensor, int, int]]:
        """Yield the slices of torch's tensors that this rank writes."""
        number = 0
        for held in self._torch_tensors:
            for first, count in slices(held.tensor.numel(), SLICE):
                number += held.writers is Writers.in_turns
                turn = number % self._group.size if held.writers is Writers.in_turns else 0
                if held.writers is Writers.each or turn == self._group.rank:
                    yield held, first, count

    def _entry(self, part: _core.StatePart) -> tuple[str, Tensor]:
        name = self._names[id(self._partition.member_of(part).parameter)]
        return name, self._entries[name]

    def _part_bytes(self, part: _core.StatePart) -> int:
        _, count = self._partition.member_of(part).of_parameter(part.first, part.count)
        return self._entry(part)[1].chunk_bytes(count)

    def _bytes(self) -> int:
        parts = [self._part_bytes(part) for part in self._local_parts]
        parts += [held.tensor.element_size() * count for held, _, count in self._local_slices()]
        return sum(parts) + INDEX_BYTES * len(parts) + len(self._extra)

    def _write(self, folder: Path) -> None:
        rank = self._group.rank
        chunks: Chunks = {}
        with self._agreement.attempt():
            writer = _core.CheckpointWriter(str(folder / contents.data_name(rank)))
        self._agreement.settle()
        mine = {(part.unit, part.tensor, part.first) for part in self._local_parts}

        def look(part: _core.StatePart) -> None:
            with self._agreement.attempt():
                if self._agreement.error is None and (part.unit, part.tensor, part.first) in mine:
                    first, count = self._partition.member_of(part).of_parameter(part.first, part.count)
                    add(chunks, self._entry(part)[0], first, count, writer.append(part))

        self._partition.visit_shards(look)
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
            step=self._access.steps,
            skipped=self._access.skipped,
            ranks=self._group.size,
            folder=folder,
            optimizer=type(self._access.optimizer).__name__,
            moments={moment.name: name for moment, name in self._access.names_of_moments()},
            groups=self._groups,
            own_step=self._access.has_own_step,
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


def groups_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[dict[str, Any]]:
    """Return the parameter groups, with names instead of parameters."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: unwrapped(value) for key, value in group.items() if key != "params"}
        try:
            json.dumps(options)
        except TypeError as error:
            refuse(
                f"cannot save a parameter group: {error}",
                where=f"param_groups[{number}]",
                needed="numbers, text, None, and lists and dictionaries of them",
            )
        groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], "options": options})
    return groups


def unwrapped(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
