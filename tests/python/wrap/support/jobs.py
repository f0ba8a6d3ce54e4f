"""Saves and loads of one checkpoint directory by several jobs, by processes that are killed, and in the background. Each is
stopped, held back or overtaken at a chosen point, not by a clock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import ballast
import torch
from ballast.checkpoint import manifest
from ballast.checkpoint.folder import RankFiles
from ballast.checkpoint.kinds import MANIFEST
from python.wrap.support.saved import Training, other_parameters, same

WORDS = {"mkdir", "open", "fsync", "replace", "write", "unlink", "rmdir", "scandir", "append", "finish", "statvfs"}
EVERY = {"append": 16, "open": 3, "unlink": 2}  # only every n-th of these frequent calls is a moment


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


# The moments at which a save can be overtaken: it has made its folder, written its files, or replaced the manifest.
MOMENTS = {
    "its folder is made": ("ballast.checkpoint.saving.require_shared", False),
    "its files are written": ("ballast.checkpoint.folder.os.replace", False),
    "its manifest is there": ("ballast.checkpoint.folder.os.replace", True),
}


def training(steps: int = 0) -> Training:
    made = Training({"stage": 2}, other_parameters(named()))
    made.train(0, steps)
    return made


def save(directory: str | Path, made: Training) -> None:
    ballast.save(directory, made.model, made.optimizer)


def load(directory: str | Path, made: Training) -> None:
    ballast.load_checkpoint(directory, made.model, made.optimizer)


def error_of(do: Callable[[], Any]) -> str:
    """Return the error of a call, or an empty string if it succeeds."""
    try:
        do()
    except ballast.Error as error:
        return str(error)
    return ""


def once(name: str, also: Callable[[], Any], after: bool = False) -> Any:
    """Return a patch of a function that calls `also` in its first call."""
    real, calls = resolve_name(name), []

    def patched(*args: Any, **options: Any) -> Any:
        calls.append(name)
        is_first = len(calls) == 1
        if is_first and not after:
            also()
        answer = real(*args, **options)
        if is_first and after:
            also()
        return answer

    return mock.patch(name, patched)


def replace(directory: Path, by: Path) -> None:
    """Replace the checkpoint of a directory by that of another one, as another job's save does."""
    old, new = folder_in(directory), folder_in(by)
    shutil.copytree(by / new, directory / new)
    shutil.copy(by / MANIFEST, directory / "next")
    os.replace(directory / "next", directory / MANIFEST)
    shutil.rmtree(directory / old)


def folder_in(directory: Path) -> str:
    return str(json.loads((directory / MANIFEST).read_bytes())["content"]["folder"])


# --- Functions that ranks run ---


def while_another_job_is_killed(rank: int, folder: str) -> tuple[str, int, str, int]:
    """Return the error of a save while another process saves, that process, the error of a save after it is killed, and the
    step of the checkpoint at the end."""
    mine = training(2)
    arrived, tell = os.pipe()

    def stop() -> None:
        os.write(tell, b"!")
        signal.pause()

    def other() -> None:
        with once("ballast.checkpoint.folder.os.replace", stop):
            save(folder, training(1))

    child = os.fork()
    if child == 0:
        try:
            other()
        finally:
            os._exit(1)
    os.read(arrived, 1)
    first = error_of(lambda: save(folder, mine))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    second = error_of(lambda: save(folder, mine))
    return first, child, second, manifest.read(folder).step


def while_the_directory_is_locked(rank: int, folder: str) -> tuple[str, int, str, bool]:
    """Return the error of a save, the process that holds the lock, the error of a save after it is released, and whether the
    training is unaffected by the failed save."""
    mine, other = Training({"stage": 2, "timeout": 60}), Training({"stage": 2, "timeout": 60})
    mine.train(0, 1), other.train(0, 1)
    save(folder, mine)
    group = mine.optimizer._ballast.group
    group.barrier()  # rank 0 unlocks the directory after the others have returned
    lock = ballast._core.DirectoryLock(directory=folder) if rank == 1 else None
    [holder] = group.all_reduce([os.getpid() * (rank == 1)])
    first = error_of(lambda: save(folder, mine))
    if lock is not None:
        lock.release()
    group.barrier()
    is_same = mine.train(1, 2) == other.train(1, 2)
    return first, holder, error_of(lambda: save(folder, mine)), is_same


def while_it_is_replaced(rank: int, folder: str, moment: str, after: bool) -> tuple[int, bool]:
    """Load while rank 1 replaces the checkpoint. Return the step that was loaded, and whether the values are the new ones."""
    here, there = Path(folder, "here"), Path(folder, "there")
    save(here, training(1))
    save(there, training(2))
    load(there, expected := training())
    mine = training()
    with once(moment, lambda: replace(here, there), after) if rank == 1 else nullcontext():
        load(here, mine)
    return mine.optimizer.steps, same(mine.everything(), expected.everything())


def reads_while_another_job_saves(rank: int, folder: str) -> int:
    """Return how often this process loads until another one has saved 24 times. Each load has to succeed."""

    def other() -> None:
        saver = training(1)
        for step in range(1, 25):
            saver.train(step, 1)
            save(folder, saver)

    save(folder, training(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            other()
            code = 0
        finally:
            os._exit(code)
    loads = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        load(folder, training())
        loads += 1
    load(folder, last := training())
    assert last.optimizer.steps == 25
    return loads


WRITTEN_BY = "ballast.checkpoint.saving.RankFiles"


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let saves in the background begin to write when the event is set, or at the end of the block."""
    may_write = threading.Event()

    def files(*arguments: Any) -> RankFiles:
        may_write.wait()
        return RankFiles(*arguments)

    with mock.patch(WRITTEN_BY, files):
        try:
            yield may_write
        finally:
            may_write.set()
