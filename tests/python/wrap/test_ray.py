"""Tests of trainings that Ray Train starts: one like any other, and the program of the guide."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
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


def program_of_guide(steps: int, before_backward: str) -> str:
    """Return the program with further lines before the backward pass, and without the minute before it sees a new node."""
    [program] = [block.text for block in blocks_of(PAGES / "guides" / "frameworks.md") if block.title == "train_with_ray.py"]
    for old, new in (
        ("        loss.backward()\n", f"{before_backward}        loss.backward()\n"),
        ('{"steps": 20}', f'{{"steps": {steps}}}'),
        ("num_workers=WORKERS", "num_workers=WORKERS, elastic_resize_monitor_interval_s=1"),
    ):
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


DIES_ONCE = """\
        if rank == 1 and optimizer.steps == 12 and not (SHARED / "died").exists():
            (SHARED / "died").touch()
            os.kill(os.getpid(), 9)
"""


@pytest.mark.thorough
def test_the_program_of_the_guide_outlives_a_worker_and_continues_on_three(ray_here, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARED", str(tmp_path))
    for workers, steps in (("2", 20), ("3", 30)):
        program = tmp_path / "train_with_ray.py"
        program.write_text(program_of_guide(steps, DIES_ONCE))
        monkeypatch.setenv("WORKERS", f"{workers}-{workers}")
        said = subprocess.run([sys.executable, program], check=True, stdout=subprocess.PIPE, text=True).stdout
        assert (tmp_path / "died").exists()
        found = re.search(rf"^step {steps} on {workers} ranks: loss (\S+)$", said, re.MULTILINE)
        assert found, said
    assert float(found[1]) == pytest.approx(loss_in_plain_torch([2] * 20 + [3] * 10), abs=1e-4)


def wait_for(path: Path, program: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert program.poll() is None
        time.sleep(0.1)


WAITS_FOR_OTHERS = """\
        if (optimizer.steps, ranks) in ((12, 3), (22, 4)):
            (SHARED / f"waits on {ranks}").touch()
            threading.Event().wait()  # until Ray ends this worker
"""


@pytest.mark.thorough
def test_the_program_of_the_guide_takes_the_workers_that_the_cluster_has(ray_here, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARED", str(tmp_path))
    monkeypatch.setenv("WORKERS", "2-4")
    script = tmp_path / "train_with_ray.py"
    script.write_text("import threading\n" + program_of_guide(30, WAITS_FOR_OTHERS))
    start_node = ("-m", "ray.scripts.scripts", "start", "--block", f"--address={os.environ['RAY_ADDRESS']}", "--num-cpus=1")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as program:
        try:
            wait_for(tmp_path / "waits on 3", program)
            node = subprocess.Popen([sys.executable, *start_node, f"--object-store-memory={100 * MIB}"])
            try:
                wait_for(tmp_path / "waits on 4", program)
            finally:
                node.terminate()
                node.wait()
            said = program.communicate()[0]
        finally:
            program.kill()
    found = re.search(r"^step 30 on 3 ranks: loss (\S+)$", said, re.MULTILINE)
    assert found, said
    assert float(found[1]) == pytest.approx(loss_in_plain_torch([3] * 10 + [4] * 10 + [3] * 10), abs=1e-4)
