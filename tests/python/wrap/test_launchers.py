"""Tests with real launchers: they start a training, and resume it after a rank was killed."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launching import mpirun, torchrun
from ports import free_ports
from python.wrap.support.programs import Program, run_program

NEEDED = ("munged", "slurmctld", "slurmd", "srun")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    return [name for name in NEEDED if shutil.which(name) is None]


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm, and yield the environment in which srun finds it."""
    host = socket.gethostname().split(".")[0]
    for name in ("controller", "node"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host,
            ports=free_ports(2),
            user=pwd.getpwuid(os.geteuid()).pw_name,
            folder=folder,
            cores=len(os.sched_getaffinity(0)),
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    with ExitStack() as daemons:
        daemons.enter_context(daemon(munge, environment))
        wait_for((folder / "munge.socket").exists)
        daemons.enter_context(daemon(["slurmctld", "-D", "-i"], environment))
        daemons.enter_context(daemon(["slurmd", "-D", "-N", host], environment))
        wait_for(lambda: "idle" in said(["sinfo", "--noheader", "--format=%T"], environment))
        yield environment


@contextmanager
def daemon(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def said(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout


def wait_for(is_there: object, seconds: float = 30, what: str = "Slurm did not start") -> None:
    end = time.monotonic() + seconds
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < end, f"{what} within {seconds} s"
        time.sleep(0.1)


SCRIPT = Path(__file__).parent / "support" / "launched.py"


def with_tests(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which ranks find the package and tests/."""
    return {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(SCRIPT.parents[3])])}


def run(launcher: list[str], environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    command = [*launcher, sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=with_tests(environment), capture_output=True, text=True, timeout=200)


def run_torchrun(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return run_program([*torchrun(2), str(SCRIPT), *arguments], with_tests(environment))


def ends(ended: subprocess.CompletedProcess) -> set[str]:
    """Return the set of final steps and digests that the ranks print."""
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"rank \d began after step \d and ended (after step \d with [0-9a-f]{64})", ended.stdout)
    assert len(said) == 2
    return set(said)


@pytest.fixture(scope="module")
def uninterrupted(environment):
    """Return the final step and digest of an uninterrupted training."""
    seen = ends(run_torchrun(environment))
    assert len(seen) == 1
    return seen


def test_launchers_start_the_same_training(environment, uninterrupted):
    assert ends(run_torchrun(environment, "--with-torch")) == uninterrupted
    assert ends(run_torchrun(environment, "--second")) == uninterrupted
    assert ends(run(mpirun(2), environment)) == uninterrupted


@pytest.mark.skipif(bool(missing()), reason=f"{', '.join(missing())} not installed: .ci/bootstrap launchers")
def test_slurm_starts_the_same_training(environment, uninterrupted, tmp_path):
    with slurm(tmp_path) as found:
        assert ends(run(["srun", "-n", "2", "--overcommit"], {**environment, **found})) == uninterrupted


@pytest.mark.skipif(bool(missing()), reason=f"{', '.join(missing())} not installed: .ci/bootstrap launchers")
def test_a_job_that_slurm_requeues_resumes_after_the_step_in_which_it_was_told(environment, uninterrupted, tmp_path):
    script, output = tmp_path / "job", tmp_path / "output"
    script.write_text(f"#!/bin/bash\nsrun --overcommit {sys.executable} {SCRIPT} --drive {tmp_path} --wait 3\n")
    submit = ["sbatch", "--parsable", "--requeue", "--ntasks=2", "--overcommit", "--open-mode=append", f"--output={output}"]
    with slurm(tmp_path) as found:
        environment = {**found, **with_tests(environment), "SLURM_CONF": found["SLURM_CONF"]}
        job = said([*submit, str(script)], environment).strip()
        wait_for((tmp_path / "waits").exists, 120, "no rank was at its step")
        said(["scontrol", "requeue", job], environment)

        def has_ended_twice() -> bool:
            said(["scontrol", "update", f"JobId={job}", "StartTime=now"], environment)  # Slurm would wait for two minutes
            return output.read_text().count("ended after") == 4

        wait_for(has_ended_twice, 120, "the job did not end twice")
    lines = re.findall(r"rank \d began after step (\d) and ended (after step (\d) with [0-9a-f]{64})", output.read_text())
    assert sorted((began, ended) for began, _, ended in lines) == [("0", "4")] * 2 + [("4", "6")] * 2
    assert {end for began, end, _ in lines if began == "4"} == uninterrupted


def test_a_rank_that_is_told_to_end_ends_all_and_the_same_command_resumes(environment, uninterrupted, tmp_path):
    (left,) = ends(run_torchrun(environment, "--drive", str(tmp_path), "--stop", "3"))
    assert left.startswith("after step 4")
    assert ends(run_torchrun(environment, "--drive", str(tmp_path))) == uninterrupted


def test_a_killed_rank_ends_the_others_and_the_same_command_resumes(environment, uninterrupted, tmp_path):
    killed = run_torchrun(environment, "--drive", str(tmp_path), "--die", "3")
    assert killed.returncode != 0
    assert "ended after" not in killed.stdout
    assert "B3301 rank 1" in killed.stderr
    assert ends(run_torchrun(environment, "--drive", str(tmp_path))) == uninterrupted


def elastic(ranks: int, folder: Path) -> list[str]:
    """Return the agent of one of up to two machines. What agents say to each other is in a file, which outlives both."""
    settings = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=8"
    rendezvous = ["--rdzv-id=two", "--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'agents'}", f"--rdzv-conf={settings}"]
    nodes = ["--nnodes=1:2", f"--nproc-per-node={ranks}", "--max-restarts=3", "--monitor-interval=0.5"]
    return ["-m", "torch.distributed.run", *nodes, *rendezvous, str(SCRIPT)]


def test_torchrun_continues_by_itself_on_the_ranks_that_are_left(environment, tmp_path):
    """One of two agents, which imitate two machines, is lost with its rank: the other two ranks take its records over."""
    first, second = ([*elastic(ranks, tmp_path), "--drive", str(tmp_path), "--lose", "3"] for ranks in (1, 2))
    with Program(first, with_tests(environment)) as lost:
        ended = run_program(second, with_tests(environment))
        assert lost.wait(timeout=60).returncode == -signal.SIGKILL
    (left,) = ends(ended)
    assert left.startswith("after step 6")
    assert re.search(r"rank 0 began after step [23] ", ended.stdout)
    assert {path.name for path in tmp_path.glob("mine-*")} == {"mine-rank-0", "mine-rank-1"}
