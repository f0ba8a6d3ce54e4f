"""Write a checkpoint of Ballast from one of another program, without a model and without ranks: piece by piece, on one
processor. Loading it gives the bits that load_checkpoint() of the other checkpoint gives."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ballast import _core
from ballast.checkpoint.commit import Commit
from ballast.checkpoint.contents import Checkpoint, SavedOptimizer, Tensor
from ballast.checkpoint.folder import CheckpointDirectory, folder_name, require_space
from ballast.checkpoint.foreign import source_of
from ballast.checkpoint.kinds import FOREIGN, kind_of, refuse_without_checkpoint
from ballast.checkpoint.manifest import content_in
from ballast.checkpoint.pieces import slices
from ballast.checkpoint.rank_files import Chunk, RankFiles
from ballast.checkpoint.saving import INDEX_BYTES, SLICE, packed
from ballast.checkpoint.source import STEP, Source, steps_made
from ballast.checks import fail_of_system, refuse
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.updates.rules import moments_by_name

log = logging.getLogger("ballast")

DTYPE = "float32"  # of parameters with state: their masters
OPTIMIZER = "another program's optimizer"


@dataclass(frozen=True)
class Converted:
    """What a conversion has written."""

    step: int
    tensors: int
    trained: int  # parameters with the optimizer's state
    moments: list[str]  # with torch's names
    bytes: int


class Conversion:
    """One conversion to a directory, which is made if it is missing."""

    def __init__(self, path: Path, directory: Path):
        self._path, self._directory = path, directory
        self._kind = _foreign_kind(path)
        _require_no_checkpoint(directory)
        self._source: Source = source_of(path)
        names = self._source.names()
        found = {name: self._source.tensor(name) for name in names}
        self._tensors = {name: stored for name, stored in found.items() if stored is not None}
        self._moments = self._moments_kept()
        self._entries = {name: self._entry(name, stored) for name, stored in self._tensors.items()}

    def run(self) -> Converted:
        step = max(entry.steps for entry in self._entries.values())
        if self._source.trained_only:
            log.warning("%s holds no frozen parameters and no buffers: those of the model will stay", self._path)
        try:
            written = self._write(step)
        except OSError as error:
            fail_of_system(error)
        trained = [entry for entry in self._entries.values() if entry.role == "trained"]
        return Converted(step, len(self._entries), len(trained), [*self._moments.values()], written)

    # --- What there is ---

    def _moments_kept(self) -> dict[str, str]:
        """Return torch's names of the moments, by the library's."""
        known = moments_by_name()
        found: dict[str, str] = {}
        for name in self._tensors:
            for key in sorted(set(self._source.state(name)) - {STEP}):
                kind = known.get(key, "")
                if not kind or found.setdefault(kind, key) != key:
                    refuse(
                        f"cannot convert the state of this optimizer: no update rule of Ballast keeps its {key}",
                        where=f"{name} in {self._path}",
                        needed=f"moments of one optimizer: {', '.join(known)}",
                        remedy="ballast.load() reads the weights alone.",
                    )
        if not found:
            refuse(
                "cannot convert a checkpoint without optimizer state to one that a training resumes",
                where=str(self._path),
                needed="moments, such as exp_avg",
                remedy="ballast.load(model, checkpoint) reads its weights, and `ballast export` writes them.",
            )
        return {kind: found[kind] for kind in ("momentum", "variance") if kind in found}

    def _entry(self, name: str, stored: StoredTensor) -> Tensor:
        """Describe a tensor for the manifest. One without state is a frozen parameter or a buffer; which of them, the model
        knows that loads it."""
        if not self._source.state(name):
            dtype = str(stored.dtype).removeprefix("torch.")
            return Tensor("frozen", dtype, stored.dtype.itemsize, list(stored.shape))
        for moment in self._moments.values():
            kept = self._source.tensor(name, moment)
            if kept is None:
                refuse(f"the checkpoint lacks the optimizer's {moment}", where=name, needed="one for each parameter with state")
            if kept.elements != stored.elements:
                refuse(f"the checkpoint holds {moment} of shape {kept.shape}", where=name, needed=f"{stored.shape}")
        entry = Tensor("trained", DTYPE, torch.float32.itemsize, list(stored.shape), format="fp32")
        entry.momentum, entry.variance = "momentum" in self._moments, "variance" in self._moments
        entry.steps = steps_made(self._source, name, needed=entry.variance)
        return entry

    # --- Writing ---

    def _write(self, step: int) -> int:
        place = CheckpointDirectory(self._directory)
        folder = folder_name(step, int.from_bytes(os.urandom(4), "little"))
        try:
            _require_no_checkpoint(self._directory)
            place.create(folder)
            require_space(self._directory, self._bytes())
            written = self._write_files(self._directory / folder)
            checkpoint = Checkpoint(
                ranks=1,
                folder=folder,
                optimizers=[SavedOptimizer(step=step, skipped=0, optimizer=OPTIMIZER, moments=self._moments, groups=[])],
                tensors=self._entries,
                indexes=[],
                converted_from=FOREIGN[self._kind],
            )
            Commit(place, folder, checkpoint.to_json()).make_current()
        except BaseException:
            place.discard(folder)
            raise
        finally:
            place.release()
        return written

    def _bytes(self) -> int:
        pieces = sum(entry.elements // SLICE + 1 for entry in self._entries.values())
        return sum(entry.chunk_bytes(entry.elements) for entry in self._entries.values()) + INDEX_BYTES * pieces

    def _write_files(self, folder: Path) -> int:
        """Write the files of the only rank, and return the bytes of its data."""
        files = RankFiles(folder, rank=0)
        chunks, written = [], []
        for name, entry in self._entries.items():
            for first, count in slices(entry.elements, SLICE):
                written.append(self._append(files.writer, name, entry, (first, count)))
                chunks.append(Chunk(name, first, count))
        return files.finish(chunks, written, packed(None))

    def _append(
        self, writer: _core.CheckpointWriter, name: str, entry: Tensor, elements: tuple[int, int]
    ) -> tuple[int, int]:
        stored = self._tensors[name]
        if entry.role != "trained":
            values = stored.read_part(*elements)
            return writer.append_memory(values.data_ptr(), values.nbytes)
        of_state: Mapping[str, StoredTensor | None] = {
            "parameter": stored,
            **{kind: self._source.tensor(name, moment) for kind, moment in self._moments.items()},
        }
        part = {kind: each.read_part(*elements).to(torch.float32) for kind, each in of_state.items() if each is not None}
        at = {kind: values.data_ptr() for kind, values in part.items()}
        return writer.append(_core.StatePart(dtype=_core.DType.fp32, count=elements[1], **at))


def _foreign_kind(path: Path) -> str:
    """Return the kind of checkpoint, or refuse one that needs no conversion, or that is none."""
    kind = kind_of(path)
    if kind == "ballast":
        refuse(f"cannot convert {path}: it is a checkpoint of Ballast already", needed="one of another program")
    return kind or refuse_without_checkpoint(path, "cannot convert a checkpoint", needed="one of another program")


def _require_no_checkpoint(directory: Path) -> None:
    if content_in(directory) != {}:  # None: one that cannot be read
        refuse(f"cannot convert to {directory}: there is a checkpoint already", needed="another directory, or none")
