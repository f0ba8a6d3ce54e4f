"""Jobs that use one checkpoint directory at once. Each is stopped or overtaken at a chosen point, not by a clock."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import ballast
from ballast.checkpoint import manifest
from ballast.checkpoint.kinds import MANIFEST
from python.wrap.support.saved import Training, other_parameters, same
from python.wrap.support.stopped import named

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
