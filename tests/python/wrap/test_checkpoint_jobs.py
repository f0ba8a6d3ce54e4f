"""Tests of two jobs with one directory: neither destroys the other's last checkpoint, and readers find a complete one."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import ballast
import pytest
from ballast import checks
from ballast.checkpoint import manifest
from ballast.checkpoint.kinds import MANIFEST
from ballast.tools.command_line import main
from python.wrap.support.ranks import run_ranks
from python.wrap.support.saved import Training, error_of, same, save, training

# The moments at which a save can be overtaken: it has made its folder, written its files, or replaced the manifest.
MOMENTS = {
    "its folder is made": ("ballast.checkpoint.saving.require_shared", False),
    "its files are written": ("ballast.checkpoint.folder.Commit.make_current", False),
    "its manifest is there": ("ballast.checkpoint.folder.Commit.make_current", True),
}


def load(directory: str | Path, made: Training) -> None:
    ballast.load_checkpoint(directory, made.model, made.optimizer)


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


def while_another_job_is_killed(rank: int, folder: str) -> tuple[str, int, str, int]:
    """Return the error of a save while another process saves, that process, the error of a save after it is killed, and the
    step of the checkpoint at the end."""
    mine = training(2)
    arrived, tell = os.pipe()

    def stop() -> None:
        os.write(tell, b"!")
        signal.pause()

    def other() -> None:
        with once("ballast.checkpoint.folder.Commit.make_current", stop):
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
    lock = ballast._core.CheckpointDirectory(folder) if rank == 1 else None
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


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_saves_while_another_does_is_refused_and_both_continue(moment, tmp_path):
    one, other, said = training(1), training(2), []
    place, after = MOMENTS[moment]
    with once(place, lambda: said.append(error_of(lambda: save(tmp_path, other))), after):
        save(tmp_path, one)
    load(tmp_path, again := training())
    assert same(again.everything(), one.everything())
    assert "B2204" in said[0] and "in use by process" in said[0]
    save(tmp_path, other)
    load(tmp_path, again := training())
    assert same(again.everything(), other.everything())


def test_a_lock_ends_with_its_process(tmp_path):
    [(first, child, second, step)] = run_ranks(1, while_another_job_is_killed, str(tmp_path / "here"))
    assert "B2204" in first and f"in use by process {child} on " in first and "since 20" in first
    assert (second, step) == ("", 2)


def test_all_ranks_name_the_holder_of_the_directory(tmp_path):
    for first, holder, second, is_same in run_ranks(2, while_the_directory_is_locked, str(tmp_path)):
        assert "B2204" in first and f"in use by process {holder} on " in first and str(tmp_path) in first
        assert second == "" and is_same


def test_a_link_to_the_directory_is_the_directory(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    one, other = training(1), training(1)
    lock = ballast._core.CheckpointDirectory(str(tmp_path / "here"))
    assert "B2204" in error_of(lambda: save(tmp_path / "link", one))
    lock.release()
    save(tmp_path / "link", one)
    save(tmp_path / "here", other)
    assert "another job has saved" in error_of(lambda: save(tmp_path / "here", one))


def test_two_histories_do_not_alternate_in_a_directory(tmp_path):
    """An old job still runs next to its replacement. A job only replaces a checkpoint that it has saved or loaded."""
    old = training(2)
    save(tmp_path, old)
    new = training()
    load(tmp_path, new)
    old.train(2, 1)
    save(tmp_path, old)
    new.train(2, 2)
    expected = new.everything()
    said = error_of(lambda: save(tmp_path, new))
    assert "B2204" in said and "another job has saved step 3" in said and "load it" in said
    assert same(new.everything(), expected) and manifest.read(tmp_path).step == 3
    save(tmp_path / "elsewhere", new)
    load(tmp_path, new)
    new.train(3, 1)
    save(tmp_path, new)
    assert "another job has saved step 4" in error_of(lambda: save(tmp_path, old))
    shutil.rmtree(tmp_path)
    save(tmp_path, old)


@pytest.mark.parametrize("fails", ["_core.require_space", "_core.CheckpointDirectory.remove_stale"])
def test_a_failed_save_is_not_taken_for_another_job(fails, tmp_path, monkeypatch):
    """A save that fails, before or after it replaces the manifest, does not prevent the next save of the same job."""
    save(tmp_path, training(1))
    mine = training(2)
    with monkeypatch.context() as there:
        there.setattr(f"ballast.{fails}", lambda *args: checks.fail("drive_full", "it is full"))
        assert "B2202" in error_of(lambda: save(tmp_path, mine))
    mine.train(2, 1)
    save(tmp_path, mine)
    assert manifest.read(tmp_path).step == 3


def refuse_locks() -> None:
    """Make flock() fail in this process from now on, as NFS does without its lock service."""
    load_call, if_equal, answer = 0x20, 0x15, 0x06  # of the kernel's filters of system calls
    flock, error, allowed = 73, 0x50000 | errno.ENOLCK, 0x7FFF0000
    rules = [(load_call, 0, 0, 0), (if_equal, 0, 1, flock), (answer, 0, 0, error), (answer, 0, 0, allowed)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    gains_nothing, filters = 38, 22
    assert libc.prctl(gains_nothing, 1, 0, 0, 0) == 0 and libc.prctl(filters, 2, program) == 0


def save_without_locks(rank: int, folder: str, moment: str) -> tuple[bool, str]:
    """Save while another job does. Return whether the folder of a third one is still there, and what is logged."""
    refuse_locks()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ballast").addHandler(handler)
    old, one, other = training(1), training(2), training(3)
    save(folder, old)
    left = Path(folder, "step-7-0123abcd")
    left.mkdir()
    place, after = MOMENTS[moment]
    with once(place, lambda: save(folder, other), after):
        save(folder, one)
    load(folder, training())
    return left.exists(), "".join(said)


@pytest.mark.parametrize("moment", MOMENTS)
def test_without_locks_a_warning_appears_and_no_job_removes_files_of_another(moment, tmp_path):
    [(is_left, said)] = run_ranks(1, save_without_locks, str(tmp_path), moment)
    assert is_left and "No locks available" in said and str(tmp_path) in said


# --- Readers ---

# The moments at which a load can be overtaken: its next read finds that a file is gone.
READS = {
    "the manifest is read": ("ballast._core.parse_checkpoint", False),
    "the ranks' files are read": ("ballast.checkpoint.loading.read_extra", False),
    "all files are there": ("ballast.checkpoint.loading.set_options", False),
    "parameters are about to change": ("ballast.checkpoint.loading.LoadingPart._fill", False),
}


@pytest.fixture
def two(tmp_path):
    """Return two directories with a checkpoint each. The second one's can replace the first one's."""
    here, there = tmp_path / "here", tmp_path / "there"
    save(here, training(1))
    save(there, training(2))
    return here, there


@pytest.mark.parametrize("moment", READS)
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_anew(moment, two):
    here, there = two
    mine, expected = training(), training()
    load(there, expected)
    place, after = READS[moment]
    with once(place, lambda: replace(here, there), after):
        load(here, mine)
    assert mine.optimizer.steps == 2 and same(mine.everything(), expected.everything())
    mine.train(2, 1)
    save(here, mine)  # allowed, as the directory has the checkpoint that it has loaded


@pytest.mark.parametrize("moment", READS)
def test_all_ranks_load_the_same_checkpoint(moment, tmp_path):
    assert run_ranks(2, while_it_is_replaced, str(tmp_path), *READS[moment]) == [(2, True)] * 2


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_commands_read_the_checkpoint_that_has_taken_the_place(verb, two, capsys):
    here, there = two
    with once("ballast._core.parse_checkpoint", lambda: replace(here, there)):
        assert main([verb, str(here), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.get("step", 2) == 2 and not said.get("problems")


def test_verify_takes_no_removed_file_for_a_broken_one(two, capsys):
    here, there = two
    with once("ballast._core.PieceReader", lambda: replace(here, there)):
        assert main(["verify", str(here)]) == 0


@pytest.mark.parametrize("read", [manifest.read, lambda here: load(here, training())], ids=["read", "load"])
def test_a_checkpoint_that_is_always_replaced_is_given_up(read, two, monkeypatch):
    here, there = two
    shutil.copytree(here, here.with_name("other"))
    turns = [there, here.with_name("other")]
    real = manifest.LocalCheckpoint.read_indexes

    def overtaken(*arguments):
        replace(here, turns[0])
        turns.reverse()
        return real(*arguments)

    monkeypatch.setattr(manifest.LocalCheckpoint, "read_indexes", overtaken)
    with pytest.raises(ballast.ResourceError, match="B2204 cannot read a checkpoint: another job has replaced it 5 times"):
        read(here)


def test_loads_succeed_while_another_job_saves(tmp_path, record_property):
    [loads] = run_ranks(1, reads_while_another_job_saves, str(tmp_path))
    record_property("loads", loads)
    assert loads > 0
