"""Tests of saves with wait=False: they write the state at the time of the call, and a failure leaves the earlier checkpoint."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ballast
import pytest
import torch
from ballast import DiLoCo
from ballast.checkpoint import manifest, saving
from python.damage import content_of
from python.wrap.support import saved
from python.wrap.support.loops import Loop
from python.wrap.support.models import Shapes
from python.wrap.support.ranks import run_ranks
from python.wrap.support.saved import begins_to_write_after, error_of, held_back, kill, stopped_while_saving
from python.wrap.support.several import Several, rule_and_own_step
from torch.distributed.device_mesh import DeviceMesh

# --- The same bytes ---


def saves_both_ways(rank: int, folder: str, configurations: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    """Save each training with and without waiting, to folders whose files the test compares. Return the bytes of the snapshot,
    and whether it was done before it could be written."""
    return [
        both_ways(Path(folder, str(number)), *begun(rank, dict(configuration)))
        for number, configuration in enumerate(configurations)
    ]


def begun(rank: int, options: dict[str, Any]) -> tuple[torch.nn.Module, Any, Callable[[int], Any]]:
    """Return a training after a few steps: its model, its optimizers, and what trains steps from a given one on."""
    kind = options.pop("kind", "frozen")
    if kind == "frozen":
        training = saved.Training(options)
        training.train(0, 2)
        training.model.blocks[3].requires_grad_(False)
        training.train(2, 2)
        return training.model, training.optimizer, lambda first: training.train(first, 2)
    if kind == "several":
        both = Several(rule_and_own_step)
        model, optimizers = both.begin(**options)
        both.train(model, optimizers, 0, 2)
        return model, optimizers, lambda first: both.train(model, optimizers, first, 2)
    loop = Loop(make_model=Shapes, make_optimizer=torch.optim.Adafactor, rank=rank, ranks=2, steps=3)
    if kind == "outer":
        loop = Loop(rank=rank, ranks=2, steps=3)
    run = loop.run(**options)

    def train(first: int) -> None:
        loop.steps = first + 2
        loop.train(run.model, run.optimizer, first)

    return run.model, run.optimizer, train


def both_ways(
    folder: Path, model: torch.nn.Module, optimizer: Any, train: Callable[[int], Any]
) -> tuple[int, bool]:
    extra, was_done = {"seeds": torch.arange(4)}, False
    for number in range(2):  # the second copy has the memory of the first
        ballast.save(folder / f"waits-{number}", model, optimizer, extra=extra)
        with held_back() as may_write:
            pending = ballast.save(folder / f"continues-{number}", model, optimizer, extra=extra, wait=False)
            extra["seeds"] += 1
            train(4 + 2 * number)
            for buffer in model.buffers():
                buffer.zero_()
            for group in (optimizer[0] if isinstance(optimizer, list) else optimizer).param_groups:
                group["lr"] *= 2
            was_done = was_done or pending.done
            may_write.set()
            pending.wait()
        assert pending.done and pending.is_settled and pending.path == folder / f"continues-{number}"
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        each.close()
    return pending.snapshot_bytes, was_done


# --- Failures ---


def one_rank_cannot_write(rank: int, folder: str) -> dict[str, Any]:
    """Return what each call says after one rank failed to write, and whether the training is unaffected."""
    training, other = saved.Training({"stage": 2}), saved.Training({"stage": 2})
    losses, expected = training.train(0, 1), other.train(0, 1)
    ballast.save(folder, training.model, training.optimizer)
    found: dict[str, Any] = {}
    calls = {
        "wait": lambda pending: pending.wait(),
        "wait again": lambda pending: pending.wait(),
        "save": lambda pending: ballast.save(folder, training.model, training.optimizer),
        "load": lambda pending: ballast.load_checkpoint(folder, training.model, training.optimizer),
        "close": lambda pending: training.optimizer.close(),
    }
    pending: Any = None
    for step, (call, do) in enumerate(calls.items(), 1):
        if call != "wait again":
            pending = fails_to_write(rank, folder, training)
            losses += training.train(step, 1)
            expected += other.train(step, 1)
        found[call] = error_of(lambda do=do, pending=pending: do(pending)), manifest.read(folder).step, files_in(folder)
        other.optimizer._ballast.group.barrier()  # rank 0 has looked at the files before the next save
    found["closed"] = error_of(lambda: training.optimizer.memory())
    ballast.save(folder + "-other", other.model, other.optimizer, wait=False).wait()
    found["same losses"] = losses == expected
    return found


def fails_to_write(rank: int, folder: str, training: saved.Training) -> Any:
    """Return a save in the background that has failed on rank 1, whose files may have 8 KiB."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        pending = ballast.save(folder, training.model, training.optimizer, wait=False)
        pending._save.wait_for_own_files()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return pending


def files_in(folder: str) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in Path(folder).iterdir())


def the_folder_is_removed(rank: int, folder: str) -> tuple[str, str, int]:
    """Return the errors of a save whose directory is removed, and of the next one; and the step that is saved then."""
    training = saved.Training({"stage": 3, "offload": "host"})
    training.train(0, 1)
    with held_back() as may_write:
        pending = ballast.save(folder, training.model, training.optimizer, wait=False)
        if rank == 0:
            shutil.rmtree(folder)
        training.train(1, 1)  # rank 0 has removed it when this ends
        may_write.set()
        first = error_of(pending.wait)
    return first, error_of(lambda: ballast.save(folder, training.model, training.optimizer)), manifest.read(folder).step


def differ_in_waiting(rank: int, folder: str) -> list[str]:
    training = saved.Training({"stage": 2})
    training.train(0, 1)
    said = [error_of(lambda: ballast.save(folder, training.model, training.optimizer, wait=rank == 0))]
    with mock.patch("ballast.checkpoint.saving.available_memory", lambda machine: 1000):
        said.append(error_of(lambda: ballast.save(folder, training.model, training.optimizer, wait=False)))
    ballast.save(folder, training.model, training.optimizer)
    return said


# --- Ends ---


def ends_without_waiting(rank: int, folder: str) -> saved.Values:
    """Save, let the optimizer go, and end this rank while nothing is written yet. Return the parameters that are saved."""
    training = saved.Training({"stage": 2})
    training.train(0, 1)
    everything = training.everything()
    begins_to_write_after(threading.main_thread().join).start()
    os.chdir(folder)
    ballast.save("here", training.model, training.optimizer, wait=False)
    os.chdir("/")
    return everything


def loses_a_rank(rank: int, folder: str) -> tuple[str, str, list[str], list[str]]:
    """Return what the training and the save say after rank 1 was killed before it wrote its files; and the files in the folder
    then, and after the next save of another training."""
    with mock.patch("ballast.checkpoint.saving.LEAST_PATIENCE", 0.0):
        training = saved.Training({"stage": 2})
        training.train(0, 1)
        ballast.save(folder, training.model, training.optimizer)
        training.train(1, 1)
        with held_back() as may_write:
            pending = ballast.save(folder, training.model, training.optimizer, wait=False)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            may_write.set()
            said = error_of(lambda: training.train(2, 1))
            waited = error_of(pending.wait)
        pending._save._thread.join()
        left = files_in(folder)
        again = saved.Training(
            {"stage": 2, "mesh": DeviceMesh.from_group(torch.distributed.new_group([0], use_local_synchronization=True), "cpu")}
        )
        ballast.load_checkpoint(folder, again.model, again.optimizer)
        assert again.optimizer.steps == 1
        ballast.save(folder, again.model, again.optimizer)
        return said, waited, left, files_in(folder)


BF16 = {"dtype": torch.bfloat16}
FILES = [f"rank-{rank:05}.{kind}" for rank in range(2) for kind in ("data", "extra", "json")]


def configurations(path):
    nvme = f"nvme:{path}"
    on_drive = {"parameters": nvme, "gradients": "host", "state": nvme}
    return [
        {"stage": 0},
        {**BF16, "stage": 1, "state_format": "compact"},
        {**BF16, "stage": 2, "offload": "host", "state_format": "4bit"},
        {**BF16, "stage": 2, "offload": nvme},
        {**BF16, "stage": 3, "state_format": "bf16"},
        {**BF16, "stage": 3, "offload": on_drive, "state_format": "compact"},
        {"stage": 3, "offload": "host", "optimizer": "NAdam"},
        {**BF16, "stage": 2, "offload": nvme, "optimizer": "RAdam"},
        {"kind": "Adafactor", "stage": 3},
        {"kind": "several", "stage": 3},
        {"kind": "outer", "stage": 2, "outer": DiLoCo(every=2, hosts=2)},
    ]


def content_in(folder):
    """Return the files of a checkpoint. The manifest has the name of the folder, which differs."""
    content = content_of(folder / "checkpoint.json")
    where = folder / content.pop("folder")
    return content, {path.name: path.read_bytes() for path in where.iterdir()}


def test_a_save_in_the_background_has_the_bytes_of_the_moment_of_the_call(tmp_path):
    """Training goes on, and buffers, groups and `extra` change, before anything is written."""
    answers = run_ranks(2, saves_both_ways, str(tmp_path), configurations(tmp_path))
    for number, configuration in enumerate(configurations(tmp_path)):
        hosts = ("host-0", "host-1") if "outer" in configuration else ("",)
        for save in range(2):
            written = 0
            for host in hosts:
                ways = (f"waits-{save}", f"continues-{save}")
                waits, continues = (content_in(tmp_path / str(number) / way / host) for way in ways)
                assert sorted(waits[1]) == (FILES if host == "" else FILES[:3])
                assert waits == continues, configuration
                written += sum(len(content) for name, content in waits[1].items() if name.endswith(".data"))
        taken = [answer[number][0] for answer in answers]
        assert not any(answer[number][1] for answer in answers)
        assert written - 4096 * 2 < sum(taken) <= written  # a file ends with a whole block


def test_a_rank_that_cannot_write_is_named_by_the_next_call_that_waits(tmp_path):
    first, second = run_ranks(2, one_rank_cannot_write, str(tmp_path / "here"))
    for found, code in ((first, "B3301"), (second, "B2202")):
        for call in ("wait", "wait again", "save", "load", "close"):
            said, step, files = found.pop(call)
            assert said.startswith(code) and ("rank 1" in said) == (code == "B3301"), call
            assert step == 1, call
        assert "closed" in found.pop("closed")
        assert found == {"same losses": True}
    assert files == ["ballast.lock", "checkpoint.json", "step"]


def test_a_directory_that_is_removed_meanwhile_is_an_error_of_the_save_alone(tmp_path):
    for first, second, step in run_ranks(2, the_folder_is_removed, str(tmp_path / "here")):
        assert first.startswith("B3201") and str(tmp_path / "here" / "step-1-") in first
        assert (second, step) == ("", 2)


def test_too_little_memory_and_ranks_that_differ_are_refused_on_all_ranks(tmp_path):
    for differ, memory in run_ranks(2, differ_in_waiting, str(tmp_path)):
        assert differ.startswith("B1001") and "the same wait= on all ranks" in differ
        assert memory.startswith("B2001") and "rank 0, 1" in memory and "1000 B" in memory and "wait=True" in memory


def test_the_next_save_and_load_wait_for_the_one_before(tmp_path):
    training = saved.Training({"stage": 3})
    training.train(0, 1)
    with held_back() as may_write:
        first = ballast.save(tmp_path, training.model, training.optimizer, wait=False)
        training.train(1, 1)
        may_write.set()
        second = ballast.save(tmp_path, training.model, training.optimizer, wait=False)
        assert first.is_settled and not second.is_settled
        ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
        assert second.is_settled and training.optimizer.steps == 2
        third = ballast.save(tmp_path, training.model, training.optimizer, wait=False)
        training.optimizer.close()
        assert third.is_settled
    third.wait()
    assert isinstance(third, ballast.PendingSave)


def test_a_save_is_repeated_after_an_interrupt(tmp_path, monkeypatch):
    """It comes when the state is copied, and no thread writes the copy."""
    training = saved.Training({"stage": 3})
    training.train(0, 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(saving, "BackgroundSave", interrupted)
        ballast.save(tmp_path, training.model, training.optimizer, wait=False)
    training.train(1, 1)
    ballast.save(tmp_path, training.model, training.optimizer, wait=False).wait()
    ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
    assert training.optimizer.steps == 2


# --- Ends of processes ---


def test_the_end_of_a_process_waits_for_its_save(tmp_path):
    """The ranks leave the folder of the relative path, and delete their optimizers, before anything is written."""
    expected = run_ranks(2, ends_without_waiting, str(tmp_path))[0]
    training = saved.Training({"stage": 2}, saved.other_parameters(saved.Buffered()))
    ballast.load_checkpoint(tmp_path / "here", training.model, training.optimizer)
    assert saved.same(training.everything(), expected)


def test_a_process_that_is_killed_in_the_middle_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    [gained] = run_ranks(1, stopped_while_saving, str(tmp_path / "here"), kill, False)
    assert len(gained) > 6
    assert set(gained) == {0, 1} and gained == sorted(gained)


def test_a_killed_rank_leaves_the_checkpoint_before_to_the_others(tmp_path):
    said, waited, left, later = run_ranks(2, loses_a_rank, str(tmp_path), lost=[1])[0]
    assert said.startswith("B3301") and waited.startswith("B3301")
    assert left == ["ballast.lock", "checkpoint.json", "step", "step"]
    assert later == ["ballast.lock", "checkpoint.json", "step"]
