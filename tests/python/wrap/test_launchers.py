"""Tests with real launchers: they start a training, and resume it after a rank was killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import mpirun, torchrun
from python.wrap.support.slurm import missing, slurm

SCRIPT = Path(__file__).parent / "support" / "launched.py"


def run(launcher: list[str], environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    folders = [environment["PYTHONPATH"], str(SCRIPT.parents[3])]  # the package, and tests/
    environment = {**environment, "PYTHONPATH": os.pathsep.join(folders)}
    command = [*launcher, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def ends(ended: subprocess.CompletedProcess) -> set[str]:
    """Return the set of final steps and digests that the ranks print."""
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"rank \d ended (after step \d with [0-9a-f]{64})", ended.stdout)
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
