"""Tests of saves with wait=False: they write the state at the time of the call, and a failure leaves the earlier checkpoint."""

import ballast
import torch
from ballast import DiLoCo
from ballast.checkpoint import manifest
from python.wrap.support import background, saved, stopped
from python.wrap.support.background import held_back
from python.wrap.support.ranks import run_ranks

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
    content = dict(manifest.content_in(folder))
    where = folder / content.pop("folder")
    return content, {path.name: path.read_bytes() for path in where.iterdir()}


def test_a_save_in_the_background_has_the_bytes_of_the_moment_of_the_call(tmp_path):
    """Training goes on, and buffers, groups and `extra` change, before anything is written."""
    answers = run_ranks(2, background.saves_both_ways, str(tmp_path), configurations(tmp_path))
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
    first, second = run_ranks(2, background.one_rank_cannot_write, str(tmp_path / "here"))
    for found, code in ((first, "B3301"), (second, "B2202")):
        for call in ("wait", "wait again", "save", "load", "close"):
            said, step, files = found.pop(call)
            assert said.startswith(code) and ("rank 1" in said) == (code == "B3301"), call
            assert step == 1, call
        assert "closed" in found.pop("closed")
        assert found == {"same losses": True}
    assert files == ["ballast.lock", "checkpoint.json", "step"]


def test_a_directory_that_is_removed_meanwhile_is_an_error_of_the_save_alone(tmp_path):
    for first, second, step in run_ranks(2, background.the_folder_is_removed, str(tmp_path / "here")):
        assert first.startswith("B3201") and str(tmp_path / "here" / "step-1-") in first
        assert (second, step) == ("", 2)


def test_too_little_memory_and_ranks_that_differ_are_refused_on_all_ranks(tmp_path):
    for differ, memory in run_ranks(2, background.differ_in_waiting, str(tmp_path)):
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


# --- Ends of processes ---


def test_the_end_of_a_process_waits_for_its_save(tmp_path):
    """The ranks leave the folder of the relative path, and delete their optimizers, before anything is written."""
    expected = run_ranks(2, background.ends_without_waiting, str(tmp_path))[0]
    training = saved.Training({"stage": 2}, saved.other_parameters(saved.Buffered()))
    ballast.load_checkpoint(tmp_path / "here", training.model, training.optimizer)
    assert saved.same(training.everything(), expected)


def test_a_process_that_is_killed_in_the_middle_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    [gained] = run_ranks(1, stopped.stopped_while_saving, str(tmp_path / "here"), stopped.kill, False)
    assert len(gained) > 6
    assert set(gained) == {0, 1} and gained == sorted(gained)


def test_a_killed_rank_leaves_the_checkpoint_before_to_the_others(tmp_path):
    said, waited, left, later = run_ranks(2, background.loses_a_rank, str(tmp_path), lost=[1])[0]
    assert said.startswith("B3301") and waited.startswith("B3301")
    assert left == ["ballast.lock", "checkpoint.json", "step", "step"]
    assert later == ["ballast.lock", "checkpoint.json", "step"]
