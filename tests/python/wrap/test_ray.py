"""Tests of trainings that Ray Train starts: one like any other, and the program of the guide."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch.distributed as dist
from docs.blocks import PAGES, blocks_of
from python.wrap.support import frameworks
from python.wrap.support.frameworks import trained
from python.wrap.support.programs import loss_in_plain_torch
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
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=100 * MIB,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
            _temp_dir=folder,
        )
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield
        ray.shutdown()


@pytest.mark.thorough  # Ray takes half a minute to start, and no part of Ballast knows it
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


def program_of_guide(steps: int) -> str:
    """Return the program, in which rank 1 dies once, before its 13th step."""
    [program] = [block.text for block in blocks_of(PAGES / "guides" / "frameworks.md") if block.title == "train_with_ray.py"]
    dies = """\
        if rank == 1 and optimizer.steps == 12 and not (SHARED / "died").exists():
            (SHARED / "died").touch()
            os.kill(os.getpid(), 9)
        loss.backward()
"""
    return program.replace("        loss.backward()\n", dies).replace('{"steps": 20}', f'{{"steps": {steps}}}')


@pytest.mark.thorough
def test_the_program_of_the_guide_outlives_a_worker_and_continues_on_three(ray_here, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARED", str(tmp_path))
    for workers, steps in (("2", 20), ("3", 30)):
        program = tmp_path / "train_with_ray.py"
        program.write_text(program_of_guide(steps))
        monkeypatch.setenv("WORKERS", workers)
        said = subprocess.run([sys.executable, program], check=True, stdout=subprocess.PIPE, text=True).stdout
        assert (tmp_path / "died").exists()
        found = re.search(rf"^step {steps} on {workers} ranks: loss (\S+)$", said, re.MULTILINE)
        assert found, said
    assert float(found[1]) == pytest.approx(loss_in_plain_torch([2] * 20 + [3] * 10), abs=1e-4)
