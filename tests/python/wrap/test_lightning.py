"""Tests of BallastStrategy: Lightning trains, saves and resumes with it as with its own data parallelism."""

import pytest
import torch
from python.wrap.support.ranks import run_ranks

pytest.importorskip("lightning", reason="lightning is not installed: .ci/bootstrap venv frameworks")
from python.wrap.support import lightning_runs  # noqa: E402


def test_lightning_trains_saves_and_resumes_as_with_its_data_parallelism(tmp_path):
    """Accumulation, clipping, a schedule, validation and checkpoints, on two ranks."""
    for rank in run_ranks(2, lightning_runs.everything, str(tmp_path)):
        for stage in (2, 3):
            for one, other in zip(rank["plain"], rank[stage]):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        steps = len(rank["plain"][0]) // 2  # of one epoch
        assert rank["resumed"][0] == rank["saved"][0][steps:]
        for one, other, evaluated in zip(rank["saved"][1], rank["resumed"][1], rank["evaluated"][1]):
            assert torch.equal(one, other)
            assert torch.equal(one, evaluated)
        assert rank["files"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
        unknown, without, failed = rank["failures"]
        assert 'no option "stages"' in unknown
        assert "without an optimizer" in without
        assert failed == "the step fails"
    saved = rank["saved"]
    [(evaluated, resumed)] = run_ranks(1, lightning_runs.on_another_number_of_ranks, str(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(saved[1], evaluated[1]))
    assert len(resumed[0]) == lightning_runs.SAMPLES // lightning_runs.BATCH  # the batches of one epoch
