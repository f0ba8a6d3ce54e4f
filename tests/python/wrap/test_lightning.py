"""Tests of BallastStrategy: Lightning trains, saves and resumes with it as with its own data parallelism."""

import pytest
import torch
from python.wrap.support.ranks import FRAMEWORKS, run_ranks


def check_close(one, other):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def same_bits(one, other):
    return len(one) == len(other) and all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_lightning_trains_saves_and_resumes_as_with_its_data_parallelism(tmp_path):
    """Accumulation, clipping, a schedule, validation, checkpoints and exported files, on two ranks and then on one."""
    pytest.importorskip("lightning", reason="lightning is not installed: .ci/bootstrap venv frameworks")
    from python.wrap.support import lightning_runs

    ranks = run_ranks(2, lightning_runs.everything, str(tmp_path), imported=FRAMEWORKS)
    for rank in ranks:
        for name in (0, 1, 2, "deferred", "saved"):
            check_close(rank["plain"], rank[name])
        bf16, bf16_here, fp16, fp16_here = rank["mixed"]
        check_close(bf16[1] + fp16[1], bf16_here[1] + fp16_here[1])
        steps = len(rank["plain"][0]) // 2  # the steps of one epoch
        assert rank["resumed"][0] == rank["saved"][0][steps:]
        for name in ("exported", "evaluated", "resumed"):
            parameters = rank[name] if name == "exported" else rank[name][1]
            assert same_bits(rank["saved"][1], parameters), name
        assert rank["files"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
        assert rank["parts"] == 1
        unknown, without, several, failed = rank["failures"]
        assert 'no option "stages"' in unknown
        assert "without an optimizer" in without
        assert "cannot train with 2 optimizers" in several
        assert failed == "the step fails"
    saved = ranks[0]["saved"]
    [outcomes] = run_ranks(1, lightning_runs.on_another_number_of_ranks, str(tmp_path), imported=FRAMEWORKS)
    evaluated, resumed, loaded = outcomes
    assert same_bits(saved[1], evaluated[1])
    assert same_bits(saved[1], loaded[1])
    of_all = [sum(losses) / len(ranks) for losses in zip(*(rank["saved"][0] for rank in ranks))]
    check_close([resumed[0], resumed[1]], [of_all[steps:], saved[1]])


def test_lightning_averages_parameters_as_with_its_data_parallelism(tmp_path):
    """EMAWeightAveraging resumes, and is evaluated. StochasticWeightAveraging makes no step in its epoch for batch
    normalization, in which Lightning clears no gradients."""
    pytest.importorskip("lightning", reason="lightning is not installed: .ci/bootstrap venv frameworks")
    from python.wrap.support import lightning_runs

    for rank in run_ranks(2, lightning_runs.averaged, str(tmp_path), imported=FRAMEWORKS):
        check_close(rank["plain"], rank["saved"])
        assert same_bits(rank["saved"][1], rank["resumed"][1])
        assert same_bits(rank["saved"][1], rank["evaluated"][1])
        assert same_bits(rank["average"], rank["normalized"][1])
