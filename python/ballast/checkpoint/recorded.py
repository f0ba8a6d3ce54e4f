"""Read a run of `wrap(run=...)` without a training: the masters and moments of each parameter in fp32, from the records of all
ranks."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from ballast import _core
from ballast.checkpoint.kinds import run_at
from ballast.checkpoint.sources import STEP, Source
from ballast.checkpoint.tensors import read_state
from ballast.errors import FailureError
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.updates.commit_metadata import decode_missed_steps


class RecordedTensor(StoredTensor):
    """A parameter, or a moment of one ("momentum", "variance")."""

    def __init__(self, run: _core.RecordedRun, name: str, kind: str, shape: tuple[int, ...], where: str):
        super().__init__(torch.float32, shape, where)
        self._run, self._name, self._kind = run, name, kind

    def read(self, first: int, count: int, into: int) -> None:
        read_state(partial(self._run.copy, self._name), self._kind, first, tensor_at(into, count, self.dtype))


class Recorded(Source):
    """The newest commit of a run. It has no frozen parameters, no buffers and no options."""

    trained_only = True

    def __init__(self, path: Path):
        directory, name = run_at(path)
        self._run = _core.RecordedRun(str(directory), name)
        self._where = str(path)
        self._shapes = {name: tuple(shape) for name, shape in self._run.tensors()}
        self._kinds = {torch_name: kind for kind, torch_name in self._run.moments.items()}
        missed: list[int] = []
        with suppress(FailureError):  # the note of a trainer in C++, or of an optimizer's own step, is none of ours
            missed = decode_missed_steps(self._run.note(), self._run.step)
        self._missed = dict(zip(self._shapes, missed)) if len(missed) == len(self._shapes) else {}

    def names(self) -> list[str]:
        return [*self._shapes]

    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        kind = self._kinds.get(moment) if moment else "parameter"
        if kind is None or name not in self._shapes:
            return None
        return RecordedTensor(self._run, name, kind, self._shapes[name], self._where)

    def state(self, name: str) -> Collection[str]:
        return {*self._kinds, STEP} if name in self._shapes else ()

    def steps(self, name: str) -> int | None:
        return self._run.step - self._missed.get(name, 0)
