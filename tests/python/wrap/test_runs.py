"""Tests of named runs: which training may resume a run, and from which step."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

import ballast
import pytest
import torch
from python.wrap.support import kept_runs
from python.wrap.support.kept_runs import Layers, kept_in, train
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks


def directory_of(folder: Path, rank: int) -> Path:
    return folder / f"mine-rank-{rank}"


def replace(directory: Path, by: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(by, directory)


def refused_and_resumed(rank: int, folder: str) -> tuple[str, int]:
    """Return the error of resuming with another layer, and the step at which the run itself resumes afterwards."""
    options = kept_in(Path(folder))
    train(Layers(), rank, 3, **options)
    try:
        train(Layers(("one", "two", "three")), rank, 4, **options)
    except ballast.UsageError as error:
        began_at, _ = train(Layers(), rank, 4, **options)
        return str(error).partition("\n  raised at")[0], began_at
    return "", -1


def stopped_between_commits(rank: int, folder: str) -> list[int]:
    """Return the step from which each start of a run resumes. One start ends after rank 0 has committed step 3 and before
    rank 1 has. The next one trains on other data, and ends after rank 1 has committed and before rank 0 has."""
    kept, copies = Path(folder, "kept"), Path(folder, "copies")
    kept.mkdir(exist_ok=True)
    own = directory_of(kept, rank)
    began = [train(Layers(), rank, 2, **kept_in(kept))[0]]
    replace(copies / f"2-{rank}", own)
    began.append(train(Layers(), rank, 3, **kept_in(kept))[0])
    replace(copies / f"3-{rank}", own)
    if rank == 1:
        replace(own, copies / "2-1")
    began.append(train(Layers(), rank, 3, data=1, **kept_in(kept))[0])
    if rank == 0:
        replace(own, copies / "3-0")
    began.append(train(Layers(), rank, 3, data=2, **kept_in(kept))[0])
    return began


def frozen(model, name):
    getattr(model, name).requires_grad_(False)
    return model


def test_a_model_with_another_layer_is_another_one(tmp_path):
    (first, began_at), other = run_ranks(2, refused_and_resumed, str(tmp_path))
    assert 'B1009 cannot resume run "mine": it has nothing more, but this training has parameter three.' in first
    assert other == (first, began_at)
    assert began_at == 3


def test_two_histories_do_not_mix_when_ranks_are_stopped_between_their_commits(tmp_path):
    for began in run_ranks(2, stopped_between_commits, str(tmp_path)):
        assert began == [0, 2, 2, 2]


@pytest.mark.parametrize("stage", [2, 3])
def test_other_frozen_layers_are_another_training(tmp_path, stage):
    options = kept_in(tmp_path, stage)
    train(frozen(Layers(), "one"), 0, 2, **options)
    with pytest.raises(ballast.UsageError, match=r'B1009 cannot resume run "mine": it has (frozen )?parameter (one|two)'):
        train(frozen(Layers(), "two"), 0, 3, **options)
    assert train(frozen(Layers(), "one"), 0, 3, **options)[0] == 2


def test_a_run_keeps_the_counts_of_steps_of_a_loaded_checkpoint(tmp_path):
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for step in range(3):
        model.two.requires_grad_(step > 0)
        model(torch.ones(20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ballast.save(tmp_path / "checkpoint", model, optimizer)
    for loads in (True, False):
        model = Layers()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**kept_in(tmp_path)))
        if loads:
            ballast.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
        assert optimizer.steps == 3
        assert [float(optimizer.state[each]["step"]) for each in model.parameters()] == [3, 3, 2, 2]
        optimizer.close()


def test_several_drives_share_the_state_of_a_run(tmp_path):
    drives = [tmp_path / "one", tmp_path / "other"]
    for drive in drives:
        drive.mkdir()
    options = {"offload": {"state": {f"nvme:{drive}": 0.5 for drive in drives}, "gradients": "host"}, "run": "mine"}
    whole = Layers()
    train(whole, 0, 4, stage=2)
    train(Layers(), 0, 2, **options)
    resumed = Layers()
    train(resumed, 0, 4, **options)
    for one, other in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(one, other)
    sizes = [sum(file.stat().st_size for file in drive.rglob("*.records")) for drive in drives]
    assert min(sizes) > 0


def test_a_tilde_is_the_home_of_the_user_in_each_tier(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "scratch").mkdir()
    assert train(Layers(), 0, 2, stage=2, offload={"state": "nvme:~/scratch"}, run="mine")[0] == 0
    assert directory_of(tmp_path / "scratch", 0).is_dir()
    assert ballast.DiLoCo(every=2, offload="nvme:~/scratch").directory == str(tmp_path / "scratch")
    with ballast.offload_activations("nvme:~/scratch"):
        pass
    with pytest.raises(ballast.UsageError, match=f"cannot use {tmp_path}/missing: it is no directory"):
        train(Layers(), 0, 2, offload={"state": "nvme:~/missing"})


def test_a_start_logs_the_run_that_it_resumes(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ballast")
    train(Layers(), 0, 2, **kept_in(tmp_path))
    assert 'begins run "mine"' in caplog.text
    train(Layers(), 0, 3, **kept_in(tmp_path))
    assert 'resumes run "mine"' in caplog.text
    assert "after step 2: commit 3 of incarnation 1; this is incarnation 2" in caplog.text


def preloaded(parameters, lr, of_first=10):
    """Return an AdamW with the state of ten steps, as a script has it that loads a state_dict() of another training. The first
    parameter may have made fewer."""
    optimizer = torch.optim.AdamW(parameters, lr=0)
    for step in range(10):
        for number, each in enumerate(optimizer.param_groups[0]["params"]):
            each.grad = torch.full_like(each, 0.1 * (number + 1)) if number > 0 or step < of_first else None
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = lr
    return optimizer


KINDS_WITH_STATE = {
    "Adagrad": (torch.optim.Adagrad, 0),
    "an own step": (partial(torch.optim.Adagrad, initial_accumulator_value=0.1), 0),
    "preloaded": (preloaded, 10),
}


@pytest.mark.parametrize(("kind", "first"), KINDS_WITH_STATE.values(), ids=KINDS_WITH_STATE)
def test_a_run_resumes_with_its_own_state_and_not_with_that_of_the_new_optimizer(kind, first, tmp_path, caplog):
    options = {"kind": kind, **kept_in(tmp_path)}
    began, whole = train(Layers(), 0, first + 6, kind=kind, stage=3)
    assert began == first
    assert train(Layers(), 0, first + 3, **options) == (first, whole[:3])
    assert not caplog.records
    if kind is preloaded:
        options["kind"] = partial(preloaded, of_first=4)
    assert train(Layers(), 0, first + 6, **options) == (first + 3, whole[3:])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (first > 0)
    assert all('run "mine" resumes after step 13, and leaves out the optimizer\'s state of step 10' in each for each in said)


def test_a_run_that_has_made_no_step_takes_the_state_of_the_new_optimizer(tmp_path):
    assert train(Layers(), 0, 0, **kept_in(tmp_path)) == (0, [])
    assert train(Layers(), 0, 11, kind=preloaded, **kept_in(tmp_path)) == train(Layers(), 0, 11, kind=preloaded, stage=3)


def test_a_run_that_begins_from_a_checkpoint_leaves_out_the_state_of_the_new_optimizer(tmp_path):
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    kept_runs.losses_until(3, model, optimizer)
    ballast.save(tmp_path / "checkpoint", model, optimizer)
    losses = kept_runs.losses_until(5, model, optimizer)
    options = {**kept_in(tmp_path), "checkpoint": tmp_path / "checkpoint"}
    assert train(Layers(), 0, 5, kind=preloaded, **options) == (3, losses)


def with_norms():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.BatchNorm1d(20), torch.nn.BatchNorm1d(20, affine=False))


def test_a_run_that_resumes_warns_of_buffers_that_it_does_not_keep(tmp_path, caplog):
    options = kept_in(tmp_path)
    train(with_norms(), 0, 3, **options)
    assert not caplog.records
    train(with_norms(), 0, 4, **options)
    [warning] = caplog.records
    said = warning.getMessage()
    assert said.startswith('run "mine" resumes after step 3, and keeps no buffers')
    assert "1.running_mean, 1.running_var, 1.num_batches_tracked and 3 more have the values of the model at wrap()" in said
    assert "ballast.save()" in said
