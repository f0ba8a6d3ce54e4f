"""The real launchers start a training, and start it again after a rank was killed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("launched.py")


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def mpirun(ranks: int) -> list[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: .ci/bootstrap launchers")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-n", str(ranks), sys.executable]


def run(launcher: list[str], environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    folders = [environment["PYTHONPATH"], str(SCRIPT.parents[2])]  # the package, and tests/
    environment = {**environment, "PYTHONPATH": os.pathsep.join(folders)}
    command = [*launcher, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def ends(ended: subprocess.CompletedProcess) -> set[str]:
    """What the ranks have ended with."""
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"rank \d ended (after step \d with [0-9a-f]{64})", ended.stdout)
    assert len(said) == 2
    return set(said)


def test_launchers_start_the_same_training(environment):
    seen = ends(run(torchrun(2), environment))
    assert ends(run(torchrun(2), environment, "--with-torch")) == seen
    assert ends(run(mpirun(2), environment)) == seen
    assert len(seen) == 1


def test_a_killed_rank_ends_the_others_and_the_same_command_goes_on(environment, tmp_path):
    whole = ends(run(torchrun(2), environment))
    killed = run(torchrun(2), environment, "--drive", str(tmp_path), "--die", "3")
    assert killed.returncode != 0
    assert "ended after" not in killed.stdout
    assert "B3301 rank 1" in killed.stderr
    assert ends(run(torchrun(2), environment, "--drive", str(tmp_path))) == whole
