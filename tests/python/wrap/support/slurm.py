"""Runs Slurm on this machine for the duration of a test: its three daemons, in a directory of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_ports

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


def wait_for(is_there: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < end, f"Slurm did not start within {seconds} s"
        time.sleep(0.1)
