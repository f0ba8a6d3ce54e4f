"""Test of a training that Ray Train starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch.distributed as dist
from python.wrap.support import frameworks
from python.wrap.support.frameworks import trained
from python.wrap.support.ranks import run_ranks


def ray_worker(training: dict[str, Any]) -> None:
    """Train and write the result to a file. Ray has already called torch.distributed.init_process_group()."""
    rank = dist.get_rank()
    (Path(training["folder"]) / f"rank {rank}").write_text(json.dumps(trained(rank, training["configuration"])))


MIB = 1 << 20
WHY = "Ray Train is not installed: .ci/bootstrap venv frameworks"


@pytest.fixture
def ray_here(environment, monkeypatch):
    """Run Ray on this machine alone, without usage statistics and without files in the user's home."""
    ray = pytest.importorskip("ray", reason=WHY)
    pytest.importorskip("ray.train.torch", reason=WHY)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    paths = os.pathsep.join([environment["PYTHONPATH"], str(Path(__file__).resolve().parents[2])])
    with TemporaryDirectory() as folder:  # pytest's paths are too long for the name of a socket
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * MIB,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


def test_ray_train_starts_the_same_training(ray_here, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    configuration = {"stage": 3}
    trainer = TorchTrainer(
        ray_worker,
        train_loop_config={"configuration": configuration, "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    trainer.fit()
    trained = [json.loads((tmp_path / f"rank {rank}").read_text()) for rank in range(2)]
    assert trained == run_ranks(2, frameworks.trained, configuration)
