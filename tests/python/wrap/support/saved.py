"""Trainings that save checkpoints, saves that are stopped or held back, and a reader of everything in a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ballast
import torch
import torch.distributed as dist
from ballast.checkpoint import manifest
from ballast.checkpoint.saving import BackgroundSave
from ballast.checkpoint.tensors import PlainTensor, Target, TrainedTensor
from python.wrap.support.loops import Loop, Tower, keywords

Configuration = Mapping[str, Any]  # options of wrap(), and "dtype"
Values = dict[str, torch.Tensor]
STEPS = 4


class Buffered(Tower):
    """A Tower with buffers, one of which is not saved. Another one counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("table", torch.arange(5), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(self.position.dtype)
        self.calls += 1
        self.mean.mul_(0.9).add_(self.first(batch).detach().mean(0), alpha=0.1)
        return super().forward(batch)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "lr": 1e-2},
        {"params": parameters[1::2], "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ]


class Training:
    """A training loop with a wrapped optimizer of two parameter groups."""

    def __init__(self, configuration: Configuration, model: torch.nn.Module | None = None):
        options = dict(configuration)
        kind = getattr(torch.optim, options.pop("optimizer", "AdamW"))
        self.model = (Buffered() if model is None else model).to(options.pop("dtype", torch.float32))
        plain = kind(groups_of(self.model), lr=1.0)
        self.optimizer = ballast.wrap(plain, self.model, **keywords(**options))
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.loop = Loop(rank=dist.get_rank() if ranks > 1 else 0, ranks=ranks, steps=STEPS)

    def train(self, first: int, steps: int) -> list[float]:
        self.loop.steps = first + steps
        return self.loop.train(self.model, self.optimizer, first).losses

    def everything(self) -> Values:
        """Return the full parameters and the buffers, as in torch's state_dict()."""
        with ballast.gather(self.model):
            return {name: value.clone() for name, value in self.model.state_dict().items()}


def train_and_save(rank: int, folder: str, configurations: list[Configuration]) -> list[Values]:
    """Train two steps, then two more with frozen parameters that have state, and with a changed learning rate. Then save."""
    seen = []
    for number, configuration in enumerate(configurations):
        training = Training(configuration)
        training.train(0, 2)
        training.model.blocks[3].requires_grad_(False)
        training.optimizer.param_groups[1]["lr"] = 1e-3
        training.train(2, 2)
        ballast.save(f"{folder}/{number}", training.model, training.optimizer, extra={"rank": rank})
        seen.append(training.everything())
    return seen


def other_parameters(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def values_in(directory: str | Path) -> Values:
    """Return all values in a checkpoint: masters and moments in fp32, others in their own dtype."""
    checkpoint = manifest.read(directory)
    values: Values = {}
    for name, entry in checkpoint.tensors.items():
        target: Target
        if entry.role == "trained":
            moments = {kind: torch.zeros(entry.shape) for saved in checkpoint.optimizers for kind in saved.moments}
            values[name] = torch.zeros(entry.shape)
            values.update((f"{name}/{kind}", moment) for kind, moment in moments.items())
            target = TrainedTensor(name, entry, values[name], moments, is_sharded=False)
        else:
            values[name] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            target = PlainTensor(name, entry, values[name])
        target.fill(checkpoint.reader([*entry.pieces]))
    return values


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


# --- One directory, and processes that are killed or held back at a chosen point, not by a clock ---

# Calls of a save, before and after which it is stopped. checkpoint_test.cpp stops them inside.
FILES = {"RankFiles", "append", "append_memory", "append_chunk", "finish"}
DIRECTORY = {"CheckpointDirectory", "create", "manifest", "make_current", "remove_stale", "discard", "release"}
WORDS = {"open", "require_same_history", "require_space", "listdir", "read_manifest", *FILES, *DIRECTORY}
EVERY = {"append": 8, "open": 3}  # only every n-th of these frequent calls is a moment


def stopped_while_saving(rank: int, folder: str, stop: Callable[[], None], waits: bool = True) -> list[int]:
    """Return for each moment how far the saved step has advanced. The last entry is that of a save that was not stopped. Saves
    in the background are stopped at every third moment."""
    gained: list[int] = []
    every = 1 if waits else 3
    in_a_child(lambda: save_next(folder, None, stop, waits))
    while True:
        before = manifest.read(folder).step
        moment = every * len(gained) + 1
        stopped = in_a_child(lambda: save_next(folder, moment, stop, waits))
        gained.append(manifest.read(folder).step - before)
        if not stopped:
            return gained


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(do: Callable[[], None]) -> bool:
    """Run `do` in a child and return whether it was stopped. It must not fail in any other way."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            do()
            code = 0
        except KeyboardInterrupt:
            kill()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed: see what it printed"
    return os.WIFSIGNALED(status)


def save_next(folder: str, moment: int | None, stop: Callable[[], None], waits: bool) -> None:
    """Resume from the checkpoint, train a step and save. The checkpoint must equal the state that a save was given. A save that
    does not wait is stopped in its thread, while the next step is trained."""
    training = Training({"stage": 3, "offload": "host"}, other_parameters(named()))
    if moment is not None:
        ballast.load_checkpoint(folder, training.model, training.optimizer)
        assert digest(training) == Path(f"{folder}-{training.optimizer.steps}").read_text()
    training.train(training.optimizer.steps, 1)
    Path(f"{folder}-{training.optimizer.steps}").write_text(digest(training))
    if moment is not None:
        (sys if waits else threading).setprofile(stopper(moment, stop))
    pending = ballast.save(folder, training.model, training.optimizer, wait=waits)
    if pending is not None:
        training.train(training.optimizer.steps, 1)
        pending.wait()
    sys.setprofile(None)
    threading.setprofile(None)
    if moment is not None:
        there = {"ballast.lock", "checkpoint.json", manifest.read(folder).folder}
        assert set(os.listdir(folder)) == there, "files of stopped saves are left"


def named() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5))


def stopper(moment: int, stop: Callable[[], None]) -> Callable[[Any, str, Any], None]:
    counts = dict.fromkeys(WORDS, 0)
    seen = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        name = getattr(arg, "__name__", "")
        if event not in ("c_call", "c_return") or name not in WORDS:
            return
        if event == "c_call":
            counts[name] += 1
        if counts[name] % EVERY.get(name, 1) == 0:
            seen += 1
        if seen == moment:
            stop()

    return profile


def digest(training: Training) -> str:
    """Return a checksum of parameters, buffers and state."""
    state = training.optimizer.state_dict()["state"]
    moments = [torch.clone(value) for values in state.values() for value in values.values()]
    everything = [*training.everything().values(), *moments]
    return str(ballast._core.checksum(b"".join(bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in everything)))


def training(steps: int = 0) -> Training:
    made = Training({"stage": 2}, other_parameters(named()))
    made.train(0, steps)
    return made


def save(directory: str | Path, made: Training) -> None:
    ballast.save(directory, made.model, made.optimizer)


def error_of(do: Callable[[], Any]) -> str:
    """Return the error of a call, or an empty string if it succeeds."""
    try:
        do()
    except ballast.Error as error:
        return str(error)
    return ""


def begins_to_write_after(wait: Callable[[], object]) -> Any:
    """Return a patch that lets saves in the background begin to write when `wait` returns."""
    write = BackgroundSave._write

    def write_later(save: BackgroundSave) -> None:
        wait()
        write(save)

    return mock.patch.object(BackgroundSave, "_write", write_later)


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let saves in the background begin to write when the event is set, or at the end of the block."""
    may_write = threading.Event()
    with begins_to_write_after(may_write.wait):
        try:
            yield may_write
        finally:
            may_write.set()
