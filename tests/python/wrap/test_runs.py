"""Tests of named runs: which training may resume a run, and from which step."""

import logging

import ballast
import pytest
from python.wrap.support import kept_runs
from python.wrap.support.kept_runs import Layers, kept_in, train
from python.wrap.support.ranks import run_ranks


def frozen(model, name):
    getattr(model, name).requires_grad_(False)
    return model


def test_a_model_whose_attributes_are_declared_in_another_order_is_another_one(tmp_path):
    (first, began_at), other = run_ranks(2, kept_runs.resumed_in_another_order, str(tmp_path))
    assert 'B1009 cannot resume run "mine": it has parameter 1 one.' in first
    assert "but this training has parameter 1 two." in first
    assert "rank 0: " in first
    assert other == (first, began_at)
    assert began_at == 3


def test_two_histories_do_not_mix_when_ranks_are_stopped_between_their_commits(tmp_path):
    for began in run_ranks(2, kept_runs.stopped_between_commits, str(tmp_path)):
        assert began == [0, 2, 2, 2]


@pytest.mark.parametrize("stage", [2, 3])
def test_other_frozen_layers_are_another_training(tmp_path, stage):
    options = kept_in(tmp_path, stage)
    train(frozen(Layers(), "one"), 0, 2, **options)
    with pytest.raises(ballast.UsageError, match=r'B1009 cannot resume run "mine": it has (frozen )?parameter 1'):
        train(frozen(Layers(), "two"), 0, 3, **options)
    assert train(frozen(Layers(), "one"), 0, 3, **options)[0] == 2


def test_another_stage_or_format_is_named(tmp_path):
    train(Layers(), 0, 1, **kept_in(tmp_path))
    with pytest.raises(ballast.UsageError, match="it has stage 3, but this training has a stage below 3"):
        train(Layers(), 0, 2, **kept_in(tmp_path, stage=2))
    with pytest.raises(ballast.UsageError, match="but this training has tiles of 128 elements of unit 1 "):
        train(Layers(), 0, 2, tile=128, **kept_in(tmp_path))


def test_a_start_logs_the_run_that_it_resumes(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ballast")
    train(Layers(), 0, 2, **kept_in(tmp_path))
    assert 'begins run "mine"' in caplog.text
    train(Layers(), 0, 3, **kept_in(tmp_path))
    assert 'resumes run "mine"' in caplog.text
    assert "after step 2: commit 3 of incarnation 1; this is incarnation 2" in caplog.text
