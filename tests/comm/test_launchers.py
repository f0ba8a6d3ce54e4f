"""Ranks that the real launchers start find each other."""

import os
import subprocess
from pathlib import Path

import pytest
from launching import mpirun, torchrun
from python.wrap.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")) / "tests" / "launched_rank"


@pytest.fixture(autouse=True)
def program():
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")


def by_torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
    return run_program([*torchrun(ranks), "--no-python", PROGRAM, *arguments], os.environ)


def by_mpirun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [*mpirun(ranks), str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


LAUNCHERS = {"torchrun": by_torchrun, "Open MPI": by_mpirun}


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_find_each_other(name: str, ranks: int):
    ended = LAUNCHERS[name](ranks)
    assert ended.returncode == 0, ended.stderr
    total = sum(range(ranks))
    assert sorted(ended.stdout.split("\n")[:-1]) == [f"{name}: rank {r} of {ranks}, sum {total}" for r in range(ranks)]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_rank_that_dies_ends_the_job(name: str):
    ended = LAUNCHERS[name](3, "1")
    assert ended.returncode != 0
    assert "sum" not in ended.stdout


def test_jobs_at_the_same_time_do_not_meet():
    processes = [subprocess.Popen([*mpirun(2), str(PROGRAM)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert sorted(output.split("\n")[:-1]) == [f"Open MPI: rank {rank} of 2, sum 1" for rank in range(2)]
