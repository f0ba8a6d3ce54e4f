"""Load a checkpoint on any number of ranks, at any stage, tier and state format. Everything that can be checked is
checked before anything changes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.agreement import Agreement
from ballast.checkpoint import manifest
from ballast.checkpoint.compatibility import leave_out, require_compatible, use_model_names
from ballast.checkpoint.contents import Checkpoint
from ballast.checkpoint.inventory import (
    buffers_by_name,
    know_checkpoints,
    parameter_names,
    parameters_by_name,
    require_all_partitioned,
    warn_of_left,
)
from ballast.checkpoint.loading_part import LOADING, LoadingPart, Source
from ballast.checkpoint.unpickling import load_without_code
from ballast.torch.collectives import by_first_rank
from ballast.torch.parameters.deferred_parameters import expect, expect_buffers, require_expected
from ballast.torch.training.checkpoint_access import CheckpointAccess


def load_current(directory: Path, model: torch.nn.Module, accesses: Sequence[CheckpointAccess]) -> Any:
    """Load the checkpoint that the manifest names, and return this rank's `extra`. All ranks call it together, and use
    the manifest that rank 0 reads.

    A save may replace the checkpoint meanwhile, and remove its files. Then the new one is loaded.
    """
    group = accesses[0].group
    read = partial(by_first_rank, group, LOADING, partial(manifest.read_text, directory))
    for _ in range(manifest.READS):
        text = read()
        agreement = Agreement(group, LOADING)
        try:
            return Loading(directory, text, model, accesses, agreement).run()
        except Exception:  # of any kind: has_failed is the same on all ranks, and decides what they do next
            if not agreement.has_failed or read() == text:
                raise
    manifest.fail_replaced(directory)


class Loading:
    """Loads one checkpoint into one model and its optimizers. All ranks do this together."""

    def __init__(
        self, directory: Path, text: bytes, model: torch.nn.Module, accesses: Sequence[CheckpointAccess], agreement: Agreement
    ):
        self._accesses = accesses
        self._directory = directory
        self._model = model
        self._agreement = agreement
        self._parameters = parameters_by_name(model, accesses)
        names, buffers = parameter_names(model, accesses), buffers_by_name(model)
        with self._agreement.attempt():
            for access in accesses:
                access.require_loadable()
                access.require_changeable()
                require_all_partitioned(access, names)
            self._checkpoint = manifest.parse(directory, text)
            use_model_names(self._checkpoint, {**self._parameters, **buffers})
            files = manifest.data_files(directory, self._checkpoint)
            left = leave_out(self._checkpoint, self._parameters, buffers)
            require_compatible(self._checkpoint, accesses, self._parameters, buffers, names)
            require_expected(model, buffers.values())
            self._buffers = [*buffers]
            self._source = Source(files, self._checkpoint.tensors, names, agreement)
            saved = zip(accesses, self._checkpoint.optimizers)
            self._parts = [LoadingPart(self._source, access, optimizer) for access, optimizer in saved]
            self._extra = read_extra(directory, self._checkpoint, accesses[0].group.rank)
        self._agreement.settle()
        warn_of_left(left, accesses[0])

    def run(self) -> Any:
        """Load the checkpoint, and return this rank's `extra`."""
        for access in self._accesses:
            access.optimizer.zero_grad()
        with self._agreement.attempt():  # finds a missing or short file before anything changes
            _core.CheckpointReader(self._source.files, self._last_pieces())
        self._agreement.settle()
        expect(self._parameters.values())
        expect_buffers(self._model)
        for part in self._parts:
            part.begin()
        buffers = buffers_by_name(self._model)
        with self._accesses[0].changed_together():
            self._parts[0].fill(self._rest(), {name: buffers[name] for name in self._buffers})
            for part in self._parts[1:]:
                part.fill([], {})
        for access in self._accesses:
            access.finish_loading()
        know_checkpoints(self._accesses, self._directory, [self._checkpoint.folder])
        return self._extra

    def _last_pieces(self) -> list[tuple[int, int, int, int]]:
        """Return the last piece of each file."""
        last = {piece.file: piece for piece in manifest.pieces_by_file(list(self._source.tensors.values()))}
        return [(piece.file, piece.offset, piece.bytes, piece.seal) for piece in last.values()]

    def _rest(self) -> list[torch.nn.Parameter]:
        """Return the parameters that no optimizer has or shards."""
        done = {number for part in self._parts for number in part.partitioned}
        done |= {id(parameter) for access in self._accesses for _, parameter in access.parameters()}
        return [parameter for parameter in self._parameters.values() if id(parameter) not in done]


def read_extra(directory: Path, checkpoint: Checkpoint, rank: int) -> Any:
    """Return the extra of the rank with the same number; additional ranks start again with that of rank 0. Tensors are
    loaded to the host, because the GPU that they were on may not exist here."""
    number = rank % checkpoint.ranks
    path, content = manifest.read_extra(directory, checkpoint, number)
    return load_without_code(io.BytesIO(content), path)
