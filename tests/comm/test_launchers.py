"""Ranks that the real launchers start find each other."""

import os
import subprocess
from pathlib import Path

import pytest
from launching import mpirun, torchrun

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")) / "tests" / "launched_rank"


@pytest.fixture(autouse=True)
def program():
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")


def by_torchrun(ranks: int, *arguments: str) -> list[str]:
    pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
    return [*torchrun(ranks), "--no-python", str(PROGRAM), *arguments]


def by_mpirun(ranks: int, *arguments: str) -> list[str]:
    return [*mpirun(ranks), str(PROGRAM), *arguments]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


LAUNCHERS = {"torchrun": by_torchrun, "Open MPI": by_mpirun}


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_find_each_other(name: str, ranks: int):
    ended = run(LAUNCHERS[name](ranks))
    assert ended.returncode == 0, ended.stderr
    total = sum(range(ranks))
    assert sorted(ended.stdout.split("\n")[:-1]) == [f"{name}: rank {r} of {ranks}, sum {total}" for r in range(ranks)]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_rank_that_dies_ends_the_job(name: str):
    ended = run(LAUNCHERS[name](3, "1"))
    assert ended.returncode != 0
    assert "sum" not in ended.stdout


def test_jobs_at_the_same_time_do_not_meet():
    processes = [subprocess.Popen(by_mpirun(2), stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert sorted(output.split("\n")[:-1]) == [f"Open MPI: rank {rank} of 2, sum 1" for rank in range(2)]
