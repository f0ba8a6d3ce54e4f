"""Kills or interrupts a process while it saves, at each call into the system or the library."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import torch
from ballast.checkpoint import manifest
from python.wrap.support.saved import Training, other_parameters

WORDS = {"mkdir", "open", "fsync", "replace", "write", "unlink", "rmdir", "scandir", "append", "finish", "statvfs"}
EVERY = {"append": 16, "open": 3, "unlink": 2}  # of these frequent calls, only every n-th is a moment


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


def interrupt() -> None:
    """Raise what Ctrl-C raises. Python still cleans up after it."""
    raise KeyboardInterrupt


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
