"""The figures of each step: as a line of text on rank 0, and as a record of each rank for `ballast report`."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ballast import _core
from ballast.checks import fail, read_count, refuse_order
from ballast.new_files import require_no_link
from ballast.sizes import human_size
from ballast.tiers import lane_in_words

if TYPE_CHECKING:
    import torch

    from ballast.torch.optimizer import WrappedOptimizer

FORMAT = 1  # the version of a StepLog's files
# The width of each value, which aligns the lines of a training.
WIDTHS = {"step": 6, "loss": 10, "norm": 9, "time": 10, "tokens/s": 10, "mfu": 5, "waited": 4}
WIDTHS |= {"device": 9, "host": 9, "nvme": 9}


class StepLine:
    """Prints a line of figures after a step, on rank 0.

    >>> import torch, ballast
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    >>> line = ballast.StepLine(optimizer)
    >>> loss = model(torch.ones(4)).square().sum()
    >>> loss.backward()
    >>> optimizer.step()
    >>> line(loss)
    step      1  loss ...  norm ...  time ... ms  device ...  waited ...%...
    >>> line.postfix(loss)["step"]
    '1'

    With `every=10`, the first step is printed, and then those whose number is a multiple of 10. The loss is this rank's, a
    number or a tensor. It is read only for a line that is printed. After `optimizer.set_tokens_per_step(n)` there are
    `tokens/s`, and `mfu` where the device's peak is known. `waited` is the part of the step in which the loop waited for
    Ballast, and the lane that it waited for most; on a GPU, it is there with `ballast.Tuning(timeline=True)`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, every: int = 1):
        from ballast.torch.optimizer import require_wrapped
        from ballast.torch.process_groups import rank_in_job

        self._optimizer = require_wrapped(optimizer, "show the steps")
        self._prints = rank_in_job() == 0
        self._every = read_count("every", every, needed="a number of steps: a whole number from 1 on")
        self._has_printed = False

    def __call__(self, loss: float | torch.Tensor | None = None) -> None:
        """Print the line of the last step. Other ranks than rank 0 may call it, and print nothing."""
        step = _figures_of(self._optimizer, "show a step")["step"]
        if self._prints and (not self._has_printed or step % self._every == 0):
            self._has_printed = True
            print(self.text(loss), flush=True)

    def text(self, loss: float | torch.Tensor | None = None) -> str:
        """Return the line of the last step."""
        return "  ".join(_entry(name, value) for name, value in self.postfix(loss).items())

    def postfix(self, loss: float | torch.Tensor | None = None) -> dict[str, str]:
        """Return the same figures by name, for `tqdm.set_postfix()`."""
        figures = _figures_of(self._optimizer, "show a step")
        return described_figures(figures, None if loss is None else _loss_value(loss))


def _figures_of(optimizer: WrappedOptimizer, what: str) -> dict[str, float]:
    figures = optimizer.metrics()
    if not figures:
        refuse_order(f"cannot {what}: the optimizer has made none yet", needed="a call after step()")
    return figures


def _loss_value(loss: Any) -> float:
    """Return a loss as a number. It is the mean of a tensor with several elements, as DataParallel returns them.

    >>> import torch
    >>> _loss_value(torch.tensor([1.0, 3.0])), _loss_value(2)
    (2.0, 2.0)
    """
    return float(loss.detach().float().mean() if hasattr(loss, "detach") else loss)


def _entry(name: str, value: str) -> str:
    amount, _, words = value.partition(" for ") if name == "waited" else (value, "", "")
    return f"{name} {amount:>{WIDTHS[name]}}" + (f" for {words}" if words else "")


def described_figures(figures: Mapping[str, float], loss: float | None) -> dict[str, str]:
    """Return the figures that a line shows, as text.

    >>> figures = {"step": 3.0, "grad_norm": 0.25, "skipped": 0.0, "seconds": 0.5, "memory_bytes/device": 2048.0}
    >>> described_figures({**figures, "exposed_seconds": 0.1, "stall_seconds/reduce": 0.1}, 2.5)
    {'step': '3', 'loss': '2.5', 'norm': '0.25', 'time': '500.0 ms', 'device': '2 KiB', 'waited': '20% for reduce'}
    """
    words = {"step": f"{figures['step']:.0f}"}
    if loss is not None:
        words["loss"] = f"{loss:.5g}"
    words["norm"] = "skipped" if figures["skipped"] else f"{figures['grad_norm']:.4g}"
    words["time"] = f"{figures['seconds'] * 1e3:,.1f} ms"
    if "tokens_per_second" in figures:
        words["tokens/s"] = f"{figures['tokens_per_second']:,.0f}"
    if "mfu" in figures:
        words["mfu"] = f"{figures['mfu']:.1%}"
    for tier in ("device", "host", "nvme"):
        if count := figures.get(f"memory_bytes/{tier}"):
            words[tier] = human_size(int(count))
    if "exposed_seconds" in figures and figures["seconds"] > 0:
        words["waited"] = _waited(figures)
    return words


def _waited(figures: Mapping[str, float]) -> str:
    by_lane = {name.rpartition("/")[2]: value for name, value in figures.items() if name.startswith("stall_seconds/")}
    part = f"{figures['exposed_seconds'] / figures['seconds']:.0%}"
    if part == "0%":
        return part
    lane = max(by_lane, key=by_lane.__getitem__)
    return f"{part} for {lane_in_words(lane, has_drive=figures.get('memory_bytes/nvme', 0) > 0)}"


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
        from ballast.torch.optimizer import require_wrapped
        from ballast.torch.process_groups import rank_in_job

        self._optimizer = require_wrapped(optimizer, "record the steps")
        self._path = Path(folder) / f"rank-{rank_in_job()}.jsonl"
        self._is_described = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            require_no_link(self._path)
            self._file = open(self._path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
            size = self._file.seek(0, os.SEEK_END)
            if size > 0 and os.pread(self._file.fileno(), 1, size - 1) != b"\n":  # a process was stopped while it wrote a line
                self._file.write(b"\n")
        except OSError as error:
            self._fail(error)

    def __call__(self, loss: float | torch.Tensor | None = None) -> None:
        """Record the last step of this rank."""
        figures = _figures_of(self._optimizer, "record a step") | _learning_rates(self._optimizer)
        if not self._is_described:
            self._is_described = True
            written = {"format": FORMAT, "ballast": _core.version, "host": socket.gethostname(), "began": time.time()}
            self._write(written | _described_training(self._optimizer))
        record: dict[str, Any] = {"at": time.time()} | ({} if loss is None else {"loss": _finite(_loss_value(loss))})
        self._write(record | {name: _finite(value) for name, value in figures.items()})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        fail("file_call", f"cannot record steps in {self._path}: {error.strerror}", where=str(self._path))


def _learning_rates(optimizer: WrappedOptimizer) -> dict[str, float]:
    """Return the learning rate by name: `lr`, or one for each parameter group where these differ."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if len(set(rates)) > 1:
        return {f"lr/{number}": rate for number, rate in enumerate(rates)}
    return {"lr": rates[0]} if rates else {}


def _finite(value: float) -> float | None:
    """Return the number; None for one that JSON does not have."""
    return value if math.isfinite(value) else None


def _described_training(optimizer: WrappedOptimizer) -> dict[str, Any]:
    """Return what a record of a training says about all of its steps."""
    training = optimizer._ballast
    options = training.options
    return {
        "rank": training.group.rank,
        "ranks": training.group.size,
        "optimizer": type(optimizer).__name__,
        "stage": options.stage,
        "state_format": options.formats.state,
        "gradient_format": options.formats.gradients,
        "memory": optimizer.memory(),
    }
