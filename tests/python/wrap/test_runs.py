"""Tests of named runs: which training may resume a run, and from which step."""

import logging

import ballast
import pytest
import torch
from python.wrap.support import kept_runs
from python.wrap.support.kept_runs import Layers, kept_in, train
from python.wrap.support.ranks import run_ranks


def frozen(model, name):
    getattr(model, name).requires_grad_(False)
    return model


def test_a_model_with_another_layer_is_another_one(tmp_path):
    (first, began_at), other = run_ranks(2, kept_runs.refused_and_resumed, str(tmp_path))
    assert 'B1009 cannot resume run "mine": it has parameter two.bias [20], but this training has parameter three.' in first
    assert other == (first, began_at)
    assert began_at == 3


def test_two_histories_do_not_mix_when_ranks_are_stopped_between_their_commits(tmp_path):
    for began in run_ranks(2, kept_runs.stopped_between_commits, str(tmp_path)):
        assert began == [0, 2, 2, 2]


@pytest.mark.parametrize("stage", [2, 3])
def test_other_frozen_layers_are_another_training(tmp_path, stage):
    options = kept_in(tmp_path, stage)
    train(frozen(Layers(), "one"), 0, 2, **options)
    with pytest.raises(ballast.UsageError, match=r'B1009 cannot resume run "mine": it has (frozen )?parameter (one|two)'):
        train(frozen(Layers(), "two"), 0, 3, **options)
    assert train(frozen(Layers(), "one"), 0, 3, **options)[0] == 2


def test_a_run_warns_of_counts_of_steps_that_it_does_not_keep(tmp_path, caplog):
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for step in range(3):
        model.two.requires_grad_(step > 0)
        model(torch.ones(20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ballast.save(tmp_path / "checkpoint", model, optimizer)
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **kept_in(tmp_path))
    assert not caplog.records
    ballast.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    [warning] = caplog.records
    assert 'run "mine" keeps one count of steps: after a restart, parameter two.' in warning.getMessage()
    assert "and 1 more counts as many" in warning.getMessage()
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


def test_a_start_logs_the_run_that_it_resumes(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ballast")
    train(Layers(), 0, 2, **kept_in(tmp_path))
    assert 'begins run "mine"' in caplog.text
    train(Layers(), 0, 3, **kept_in(tmp_path))
    assert 'resumes run "mine"' in caplog.text
    assert "after step 2: commit 3 of incarnation 1; this is incarnation 2" in caplog.text
