"""Tests of runs of several optimizers: wherever they were stopped, they are resumed after a round of steps of all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.kept_runs import Layers, kept_in
from python.wrap.support.loops import keywords, mean_square
from python.wrap.support.ranks import run_ranks

Make = Callable[[Layers], list[Any]]


def rules(model: Layers) -> list[Any]:
    return [torch.optim.AdamW(model.one.parameters(), lr=1e-2), torch.optim.SGD(model.two.parameters(), lr=0.1, momentum=0.9)]


def rule_and_own_step(model: Layers) -> list[Any]:
    return [torch.optim.AdamW(model.one.parameters(), lr=1e-2), torch.optim.NAdam(model.two.parameters(), lr=1e-2)]


def muon_and_adamw(model: Layers) -> list[Any]:
    matrices, vectors = [model.one.weight, model.two.weight], [model.one.bias, model.two.bias]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-2)]


@dataclass
class Joint:
    """A training, each of whose rounds is a step of both optimizers."""

    folder: Path
    make: Make = rules
    options: dict[str, Any] = field(default_factory=dict)
    infinite: Collection[int] = ()  # rounds in which the second optimizer's gradients are not finite
    unused: Collection[int] = ()  # rounds in which the second optimizer has no gradients
    rank: int = 0

    def begin(self) -> tuple[Layers, list[Any]]:
        self.folder.mkdir(exist_ok=True)
        model = Layers()
        options = {"stage": 3, "offload": {"state": f"nvme:{self.folder}"}, "run": "mine", **self.options}
        return model, ballast.wrap(self.make(model), model, **keywords(**options))

    def backward(self, model: Layers, number: int) -> None:
        seed = torch.Generator().manual_seed(10 * number + self.rank)
        used = model.one if number in self.unused else model
        mean_square(used, torch.randn(8, 20, generator=seed)).backward()

    def rounds(self, model: Layers, optimizers: list[Any], until: int, after_step: Callable[[], None] = lambda: None) -> None:
        for number in range(optimizers[0].steps, until):
            self.backward(model, number)
            for optimizer in optimizers:
                is_infinite = number in self.infinite and optimizer is optimizers[1]
                optimizer.found_inf = torch.tensor(1.0 if is_infinite else 0.0)
                optimizer.step()
                after_step()
                optimizer.zero_grad()

    def values(self, model: Layers, optimizers: list[Any]) -> list[torch.Tensor]:
        """Return the parameters and the state, and close the optimizers."""
        with ballast.gather(model):
            values = [each.detach().clone() for each in model.parameters()]
        for optimizer in optimizers:
            entries = [entry for state in optimizer.state_dict()["state"].values() for entry in state.values()]
            values += [torch.as_tensor(entry).clone() for entry in entries]
            optimizer.close()
        return values

    def run(self, until: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return the steps at which the optimizers began, and the values at the end."""
        model, optimizers = self.begin()
        began_at = [each.steps for each in optimizers]
        self.rounds(model, optimizers, until)
        return began_at, self.values(model, optimizers)

    def run_and_copy(self, until: int, copies: Path, *, together: bool = False) -> list[torch.Tensor]:
        """Copy the folder after each step of each optimizer, when it is committed on this rank, or `together` on all. Return
        the values at the end."""
        model, optimizers = self.begin()

        def copy() -> None:
            for optimizer in optimizers:
                optimizer._ballast.wait_for_commit()
            if together:
                dist.barrier()
            shutil.copytree(self.folder, copies / f"{len(list(copies.iterdir())):02}")
            if together:
                dist.barrier()

        copies.mkdir()
        copy()
        self.rounds(model, optimizers, until, copy)
        return self.values(model, optimizers)


def stopped_on_ranks(rank: int, folder: str) -> tuple[list[list[int]], bool]:
    """Return the steps at which each start begins. Rank 0 is set back to the moment between the steps of a round, and then all
    ranks to the end of the round before, where rank 1 had begun the next one. Also return whether the values at the end are
    those of a training that was not stopped."""
    kept, copies = Path(folder, "kept"), Path(folder, f"copies-{rank}")
    training = Joint(kept, rule_and_own_step, rank=rank)
    whole = training.run_and_copy(4, copies)
    began = []
    for of_rank_0, of_rank_1 in ((3, 4), (5, 4), (6, 7), (8, 7)):
        _set_back(kept, copies / f"{(of_rank_0, of_rank_1)[rank]:02}", rank)
        began_at, values = training.run(4)
        began.append(began_at)
    return began, all(map(torch.equal, whole, values))


def begun_on_ranks(rank: int, folder: str) -> list[torch.Tensor]:
    """Return the values after two rounds. The folder `stopped` has the records of a moment in the third one."""
    stopped, whole = Path(folder, "stopped"), Path(folder, "whole")
    _, values = Joint(whole, rule_and_own_step, rank=rank).run(2)
    training = Joint(stopped, rule_and_own_step, rank=rank)
    training.run_and_copy(3, Path(folder, f"copies-{rank}"))
    _set_back(stopped, Path(folder, f"copies-{rank}", ("05", "04")[rank]), rank)
    return values


def mirrored_on_ranks(rank: int, folder: str) -> tuple[list[int], bool]:
    """Return the steps at which a start begins whose rank 1 has lost its drive in the middle of a round, and whether the
    values at the end are those of a training that was not stopped."""
    drive, copies = Path(folder, f"drive-{rank}"), Path(folder, f"copies-{rank}")
    training = Joint(drive, rule_and_own_step, {"mirror": True}, rank=rank)
    whole = training.run_and_copy(4, copies, together=True)
    shutil.rmtree(drive)
    if rank == 0:
        shutil.copytree(copies / "05", drive)
    began_at, values = training.run(4)
    if rank == 0:
        for mirror in drive.rglob("mirror*.records"):
            with mirror.open("r+b") as file:
                file.write(b"damaged")
    dist.barrier()
    assert training.run(5)[0] == [4, 4]
    return began_at, all(map(torch.equal, whole, values))


def copied_on_ranks(rank: int, folder: str, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Return the steps at which a start begins that was stopped when rank 0 had committed the last round and rank 1 had not,
    and whether the values are those of the whole training. Rank 0 has a copy of the records of rank 1."""
    drive, copies = Path(folder, f"drive-{rank}"), Path(folder, f"copies-{rank}")
    training = Joint(drive, rule_and_own_step, options, rank=rank)
    whole = training.run_and_copy(4, copies, together=True)
    shutil.rmtree(drive)
    shutil.copytree(copies / ("08", "07")[rank], drive)
    began_at, values = training.run(4)
    return began_at, all(map(torch.equal, whole, values))


def _set_back(kept: Path, copy: Path, rank: int) -> None:
    for name in (f"mine-rank-{rank}", f"mine-optimizer-1-rank-{rank}"):
        shutil.rmtree(kept / name)
        shutil.copytree(copy / name, kept / name)


def check_resumed_from_each_copy(training, copies, values, rounds):
    """Copy number 2n + k was made after n rounds and k steps."""
    made = sorted(copies.iterdir())
    assert len(made) == 2 * rounds + 1
    for number, folder in enumerate(made):
        began_at, ended = replace(training, folder=folder).run(rounds)
        skipped = len([each for each in {*training.infinite, *training.unused} if each < number // 2])
        assert began_at == [number // 2, number // 2 - skipped]
        assert all(map(torch.equal, ended, values))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"make": rule_and_own_step, "options": {"stage": 2}},
        {"make": muon_and_adamw, "infinite": (1,)},
        {"unused": (1, 2)},
        {"make": rule_and_own_step, "unused": (1,), "infinite": (2,)},
        {"options": {"update_in_backward": True}, "unused": (1,)},
    ],
    ids=["rules", "own step", "Muon, infinite", "unused", "own step, unused, infinite", "in backward, unused"],
)
def test_runs_resume_after_a_round_wherever_they_were_stopped(tmp_path, changes):
    training = Joint(tmp_path / "run", **changes)
    values = training.run_and_copy(4, tmp_path / "copies")
    check_resumed_from_each_copy(training, tmp_path / "copies", values, 4)


def test_ranks_that_were_stopped_at_other_moments_resume_the_same_round(tmp_path):
    for began, is_same in run_ranks(2, stopped_on_ranks, str(tmp_path)):
        assert began == [[1, 1], [2, 2], [3, 3], [3, 3]]
        assert is_same


def test_runs_are_continued_by_other_ranks_in_another_stage(tmp_path):
    of_ranks = run_ranks(2, begun_on_ranks, str(tmp_path))
    training = Joint(tmp_path / "stopped", rule_and_own_step, {"stage": 2, "tile": 128})
    began_at, values = training.run(2)
    assert began_at == [2, 2]
    assert all(map(torch.equal, values[:4], of_ranks[0][:4]))  # the parameters: the rest is shards
    assert training.run(4)[0] == [2, 2]


def test_runs_with_mirrors_survive_the_loss_of_a_drive_between_two_steps(tmp_path):
    for began_at, is_same in run_ranks(2, mirrored_on_ranks, str(tmp_path)):
        assert began_at == [2, 2]
        assert is_same


def test_each_optimizer_makes_one_step_in_a_round(tmp_path):
    training = Joint(tmp_path)
    model, [first, second] = training.begin()
    training.rounds(model, [first, second], 1)
    training.backward(model, 1)
    second.step()
    with pytest.raises(ballast.UsageError, match='of run "mine-optimizer-1" in this round: run "mine" has not'):
        second.step()
    with pytest.raises(ballast.UsageError, match='state of run "mine-optimizer-1" between the steps of a round'):
        with ballast.gather(model.two), torch.no_grad():
            model.two.weight.zero_()
    with pytest.raises(ballast.UsageError, match="B1007 cannot change the state of run"):
        load_what_was_saved(tmp_path, model, [first, second])
    first.step()
    second.zero_grad()
    with ballast.gather(model.two), torch.no_grad():
        model.two.weight.zero_()
    for optimizer in (first, second):
        optimizer.close()
    model, optimizers = training.begin()
    with ballast.gather(model.two):
        assert not model.two.weight.any()
    assert [each.steps for each in optimizers] == [2, 2]
    for optimizer in optimizers:
        optimizer.close()


def load_what_was_saved(folder, model, optimizers):
    ballast.save(folder / "checkpoint", model, optimizers)
    ballast.load_checkpoint(folder / "checkpoint", model, optimizers)


def test_a_load_that_is_stopped_is_undone(tmp_path, monkeypatch):
    training = Joint(tmp_path / "run")
    model, optimizers = training.begin()
    training.rounds(model, optimizers, 1)
    ballast.save(tmp_path / "checkpoint", model, optimizers)
    training.rounds(model, optimizers, 3)
    expected = training.values(model, optimizers)
    model, optimizers = training.begin()
    monkeypatch.setattr(optimizers[1]._ballast.current, "change_shards", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ballast.load_checkpoint(tmp_path / "checkpoint", model, optimizers)
    shutil.copytree(tmp_path / "run", tmp_path / "as it was left")
    began_at, values = replace(training, folder=tmp_path / "as it was left").run(3)
    assert began_at == [3, 3]
    assert all(map(torch.equal, values, expected))


def test_a_run_of_several_optimizers_is_not_resumed_by_others(tmp_path):
    training = Joint(tmp_path)
    training.run(2)
    model = Layers()
    with pytest.raises(ballast.UsageError, match='B1009 cannot resume run "mine" alone: it is one of 2'):
        ballast.wrap(torch.optim.AdamW(model.one.parameters(), lr=1e-2), model, **keywords(**kept_in(tmp_path)))
    model = Layers(("one", "two", "three"))
    three = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model.one, model.two, model.three)]
    with pytest.raises(ballast.UsageError, match="B1001 .*\n.*all 2 runs that belong together"):
        ballast.wrap(three, model, **keywords(**kept_in(tmp_path), checkpoint=tmp_path))
    model = Layers()
    with pytest.raises(ballast.UsageError, match="B1009 cannot resume run"):
        ballast.wrap(rules(model)[::-1], model, **keywords(**kept_in(tmp_path)))
    assert training.run(3)[0] == [2, 2]


def test_optimizers_of_a_run_are_wrapped_in_one_call(tmp_path):
    model = Layers()
    first, second = rules(model)
    first = ballast.wrap(first, model, **keywords(**kept_in(tmp_path)))
    for options in ({**kept_in(tmp_path), "run": "other"}, {"stage": 3}, kept_in(tmp_path)):
        with pytest.raises(ballast.UsageError, match="B1001 .*\n.*all optimizers in one call"):
            ballast.wrap(second, model, **keywords(**options))
    first.close()


def test_runs_without_records_begin_from_the_newest_checkpoint(tmp_path, caplog):
    training = Joint(tmp_path / "run", options={"checkpoint": tmp_path})
    model, optimizers = training.begin()
    training.rounds(model, optimizers, 2)
    ballast.save(tmp_path / "checkpoint", model, optimizers)
    training.rounds(model, optimizers, 4)
    expected = training.values(model, optimizers)
    for records in (training.folder / "mine-optimizer-1-rank-0").glob("state*"):
        records.unlink()
    with pytest.raises(ballast.UsageError, match='B1009 .*no round in common(.|\n)*run "mine-optimizer-1" has no step'):
        replace(training, options={}).run(4)
    began_at, values = training.run(4)
    assert began_at == [2, 2]
    assert all(map(torch.equal, values, expected))
    assert "its records were of step 4, so 2 steps are lost: cannot resume runs together: they have no" in caplog.text
    with (training.folder / "mine-rank-0" / "state.records").open("r+b") as records:
        records.seek(4096)
        records.write(bytes(32 * 4096))  # the bytes cover both commits
    assert training.run(4)[0] == [2, 2]
    assert 'its records were of step 4, so 2 steps are lost: cannot resume run "mine": its ranks have no' in caplog.text
    assert training.run(5)[0] == [4, 4]


@pytest.mark.parametrize("stepped", [False, True], ids=["between rounds", "after the other's step"])
def test_changes_between_steps_belong_to_the_round_before(tmp_path, stepped):
    training = Joint(tmp_path / "run")
    model, [first, second] = training.begin()
    training.rounds(model, [first, second], 2)
    if stepped:
        training.backward(model, 2)
        second.step()
        second.zero_grad()
    for _ in range(2):
        with ballast.gather(model.one), torch.no_grad():
            model.one.weight.mul_(0.5)
    for optimizer in (first, second):
        optimizer.close()
    for stage in (2, 3, 3):  # the first one takes the records over
        model, optimizers = replace(training, options={"stage": stage}).begin()
        assert [each.steps for each in optimizers] == [2, 2]
        for optimizer in optimizers:
            optimizer.close()


def test_loaded_state_and_offloading_leave_runs_that_resume(tmp_path):
    training = Joint(tmp_path)
    model, [first, second] = training.begin()
    training.rounds(model, [first, second], 2)
    first.load_state_dict(first.state_dict())
    training.rounds(model, [first, second], 3)
    training.backward(model, 3)
    second.step()
    second.offload()
    first.step()
    second.reload()
    first.load_state_dict(first.state_dict())
    first.zero_grad()
    for optimizer in (first, second):
        optimizer.close()
    assert training.run(5)[0] == [4, 4]


@pytest.mark.parametrize("closed", [1, 2])
def test_updates_of_a_backward_pass_are_committed_with_a_round_when_the_optimizers_are_closed(tmp_path, closed):
    training = Joint(tmp_path / "run", options={"update_in_backward": True})
    model, optimizers = training.begin()
    training.rounds(model, optimizers, 2)
    training.backward(model, 2)
    for optimizer in optimizers[:closed]:
        optimizer.close()
    shutil.copytree(training.folder, tmp_path / "copy")
    for optimizer in optimizers[closed:]:
        optimizer.close()
    began_at, values = replace(training, folder=tmp_path / "copy").run(4)
    assert began_at == ([2, 2] if closed == 1 else [3, 3])
    assert all(map(torch.equal, values, replace(training, folder=tmp_path / "whole").run(4)[1]))


def test_a_second_backward_pass_of_a_round_overwrites_nothing(tmp_path):
    training = Joint(tmp_path / "run", options={"update_in_backward": True})
    model, [first, second] = training.begin()
    training.rounds(model, [first, second], 1)
    mean_square(model.one, torch.ones(8, 20)).backward()
    first.step()
    first.zero_grad()
    with pytest.raises(ballast.UsageError, match='another step of run "mine" in this round'):
        mean_square(model.one, torch.ones(8, 20)).backward()
    shutil.copytree(training.folder, tmp_path / "copy")
    assert replace(training, folder=tmp_path / "copy").run(2)[0] == [1, 1]


def test_no_optimizer_goes_on_without_the_others(tmp_path):
    training = Joint(tmp_path)
    model, [first, second] = training.begin()
    training.rounds(model, [first, second], 1)
    second.close()
    training.backward(model, 1)
    with pytest.raises(ballast.UsageError, match='run "mine-optimizer-1", resumed with it, is closed'):
        first.step()
    first.zero_grad()
    first.close()
    assert training.run(2)[0] == [1, 1]


@pytest.mark.parametrize("options", [{"mirror": True}, {"stage": 0}], ids=str)
def test_a_commit_of_which_another_rank_has_a_copy_is_resumed(tmp_path, options):
    for began, is_same in run_ranks(2, copied_on_ranks, str(tmp_path), options):
        assert began == [4, 4]
        assert is_same


def test_a_list_of_which_the_second_is_refused_keeps_the_state_of_both(tmp_path):
    options = {"offload": f"nvme:{tmp_path}", "run": "mine"}

    def stepped(width):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, width))
        optimizers = [torch.optim.AdamW(part.parameters()) for part in model]
        model(torch.ones(4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return model, optimizers

    model, optimizers = stepped(4)
    for optimizer in ballast.wrap(optimizers, model, **keywords(**options)):
        optimizer.close()
    model, optimizers = stepped(5)
    before = [{key: dict(values) for key, values in optimizer.state.items()} for optimizer in optimizers]
    with pytest.raises(ballast.UsageError, match="B1009"):
        ballast.wrap(optimizers, model, **keywords(**options))
    for optimizer, values in zip(optimizers, before):
        assert type(optimizer) is torch.optim.AdamW
        assert {key: dict(shown) for key, shown in optimizer.state.items()} == values
