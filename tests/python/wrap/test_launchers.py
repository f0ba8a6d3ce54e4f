"""Tests with real launchers: they start a training, and resume it after a rank was killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import mpirun, torchrun
from python.wrap.support.slurm import missing, slurm

SCRIPT = Path(__file__).parent / "support" / "launched.py"


def command(launcher: list[str], environment: dict[str, str], *arguments: str) -> dict:
    folders = [environment["PYTHONPATH"], str(SCRIPT.parents[3])]  # the package, and tests/
    environment = {**environment, "PYTHONPATH": os.pathsep.join(folders)}
    return {"args": [*launcher, str(SCRIPT), *arguments], "env": environment, "text": True}


def run(launcher: list[str], environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(**command(launcher, environment, *arguments), capture_output=True, timeout=200)


def ends(ended: subprocess.CompletedProcess) -> set[str]:
    """Return the set of final steps and digests that the ranks print."""
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"rank \d began after step \d and ended (after step \d with [0-9a-f]{64})", ended.stdout)
    assert len(said) == 2
    return set(said)


@pytest.fixture(scope="module")
def uninterrupted(environment):
    """Return the final step and digest of an uninterrupted training."""
    seen = ends(run(torchrun(2), environment))
    assert len(seen) == 1
    return seen


def test_launchers_start_the_same_training(environment, uninterrupted):
    assert ends(run(torchrun(2), environment, "--with-torch")) == uninterrupted
    assert ends(run(torchrun(2), environment, "--second")) == uninterrupted
    assert ends(run([*mpirun(2), sys.executable], environment)) == uninterrupted


@pytest.mark.skipif(bool(missing()), reason=f"{', '.join(missing())} not installed: .ci/bootstrap launchers")
def test_slurm_starts_the_same_training(environment, uninterrupted, tmp_path):
    with slurm(tmp_path) as found:
        assert ends(run(["srun", "-n", "2", "--overcommit", sys.executable], {**environment, **found})) == uninterrupted


def test_a_rank_that_is_told_to_end_ends_all_and_the_same_command_resumes(environment, uninterrupted, tmp_path):
    (left,) = ends(run(torchrun(2), environment, "--drive", str(tmp_path), "--stop", "3"))
    assert left.startswith("after step 4")
    assert ends(run(torchrun(2), environment, "--drive", str(tmp_path))) == uninterrupted


def test_a_killed_rank_ends_the_others_and_the_same_command_resumes(environment, uninterrupted, tmp_path):
    killed = run(torchrun(2), environment, "--drive", str(tmp_path), "--die", "3")
    assert killed.returncode != 0
    assert "ended after" not in killed.stdout
    assert "B3301 rank 1" in killed.stderr
    assert ends(run(torchrun(2), environment, "--drive", str(tmp_path))) == uninterrupted


def elastic(ranks: int, folder: Path) -> list[str]:
    """Return the agent of one of up to two machines. What agents say to each other is in a file, which outlives both."""
    settings = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=8"
    rendezvous = ["--rdzv-id=two", "--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'agents'}", f"--rdzv-conf={settings}"]
    nodes = ["--nnodes=1:2", f"--nproc-per-node={ranks}", "--max-restarts=3", "--monitor-interval=0.5"]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *rendezvous]


def test_torchrun_continues_by_itself_on_the_ranks_that_are_left(environment, tmp_path):
    """One of two agents, which imitate two machines, is lost with its rank: the other two ranks take its records over."""
    arguments = ("--drive", str(tmp_path), "--lose", "3")
    with subprocess.Popen(**command(elastic(1, tmp_path), environment, *arguments)) as lost:
        ended = run(elastic(2, tmp_path), environment, *arguments)
        lost.wait(timeout=60)
    assert lost.returncode == -signal.SIGKILL
    (left,) = ends(ended)
    assert left.startswith("after step 6")
    assert re.search(r"rank 0 began after step [23] ", ended.stdout)
    assert {path.name for path in tmp_path.glob("mine-*")} == {"mine-rank-0", "mine-rank-1"}
