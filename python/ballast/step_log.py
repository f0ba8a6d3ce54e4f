"""Record the figures of each step in files, one of each rank, for `ballast report`."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ballast import _core
from ballast.checks import fail
from ballast.new_files import require_no_link

if TYPE_CHECKING:
    import torch

FORMAT = 1


def name_of(rank: int) -> str:
    """Return the name of a rank's file in the folder of a run."""
    return f"rank-{rank}.jsonl"


class StepLog:
    """Records the figures of each step in a folder, as lines of JSON. Each rank writes its own file there.

    >>> import tempfile, torch, ballast
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = ballast.StepLog(folder, optimizer)
    ...     loss = model(torch.ones(4)).square().sum()
    ...     loss.backward()
    ...     optimizer.step()
    ...     log(loss)
    ...     sorted(os.listdir(folder))
    ['rank-0.jsonl']

    The first line describes the training. Each line after it has `at`, the time in seconds since 1970, `loss` if it is
    given, the learning rate `lr` (`lr/0`, `lr/1` where parameter groups differ), and the figures of `metrics()`; null
    stands for a value that is not finite. A training that resumes with the same folder adds to the files. Each call reads
    the loss, and flushes its line.
    """

    def __init__(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer):
        from ballast.torch.last_step import rank_in_job, require_wrapped

        self._optimizer = require_wrapped(optimizer, "record the steps")
        self._path = Path(folder) / name_of(rank_in_job(self._optimizer))
        self._is_described = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            require_no_link(self._path)
            self._file = open(self._path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
            if ends_inside_a_line(self._path):
                self._file.write(b"\n")
        except OSError as error:
            self._fail(error)

    def __call__(self, loss: float | torch.Tensor | None = None) -> None:
        """Record the last step of this rank."""
        from ballast.torch.last_step import described_training, figures_of, finite, learning_rates, loss_value

        figures = figures_of(self._optimizer, "record a step") | learning_rates(self._optimizer)
        if not self._is_described:
            self._is_described = True
            written = {"format": FORMAT, "ballast": _core.version, "host": socket.gethostname(), "began": time.time()}
            self._write(written | described_training(self._optimizer))
        record: dict[str, Any] = {"at": time.time()} | ({} if loss is None else {"loss": finite(loss_value(loss))})
        self._write(record | {name: finite(value) for name, value in figures.items()})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        fail("file_call", _core.Problem(what=f"cannot record steps in {self._path}: {error.strerror}", where=str(self._path)))


def ends_inside_a_line(path: Path) -> bool:
    """Return whether a process was stopped while it wrote the last line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read() != b"\n"
