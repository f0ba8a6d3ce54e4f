"""Tests of torchtitan's Trainer with Ballast's optimizers, against fully_shard(): with CPUs in place of GPUs."""

from dataclasses import replace

import ballast
import pytest
import torch
from python.wrap.support import torchtitan_runs
from python.wrap.support.ranks import run_ranks

pytest.importorskip("spmd_types", reason="torchtitan is not installed: .ci/bootstrap venv frameworks")

HOWS = (None, {"stage": 3}, {"stage": 2, "offload": "host"})


def test_torchtitan_trains_as_with_fully_shard(tmp_path):
    """Two ranks have other words, clip and warm up. Ballast averages over ranks, and torchtitan's losses are parts of a sum."""
    for runs in run_ranks(torchtitan_runs.RANKS, torchtitan_runs.train_each, str(tmp_path), HOWS):
        (losses, norms, values), stage_3, stage_2 = runs
        assert max(norms) > torchtitan_runs.CLIP and losses[-1] < losses[0]
        assert stage_3[0] == pytest.approx(losses, rel=1e-5) and stage_3[1] == pytest.approx(norms, rel=1e-4)
        for mine, theirs in zip(stage_3[2], values, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        assert stage_3[:2] == stage_2[:2]
        assert all(torch.equal(*each) for each in zip(stage_3[2], stage_2[2], strict=True))


def refusals(rank: int, folder: str) -> list[str]:
    """Return what is said of each configuration that Ballast cannot train with."""
    said = []
    for change in (
        lambda config: setattr(config.training, "mixed_precision_param", "bfloat16"),
        lambda config: setattr(config.training, "disable_cuda_graphs", False),
        lambda config: setattr(config.parallelism, "tensor_parallel_degree", 2),
        lambda config: setattr(config, "checkpoint", replace(config.checkpoint, enable=True, last_save_model_only=False)),
    ):
        with pytest.raises(ballast.UsageError) as caught:
            torchtitan_runs.train(rank, folder, {"stage": 2}, change)
        said.append(str(caught.value))
    return said


def test_what_torchtitan_would_do_a_second_time_is_refused(tmp_path):
    for formats, graphs, parallel, checkpoints in run_ranks(2, refusals, str(tmp_path)):
        assert "cannot compute in bfloat16 with parameters in float32" in formats
        assert "training.disable_cuda_graphs" in graphs
        assert "with Ballast and tp" in parallel
        assert "ballast.save()" in checkpoints
