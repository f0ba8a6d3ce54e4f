"""The commands that start ranks."""

import os
import shutil
from tempfile import TemporaryDirectory, mkdtemp

import pytest

_folders = TemporaryDirectory(prefix="ballast-mpi-")  # gone when Python ends


def torchrun(ranks: int) -> list[str]:
    """Return what follows `python`, for run_program()."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def mpirun(ranks: int) -> list[str]:
    """With a folder of its own: jobs that begin in the same one can stumble over each other when they make it."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: .ci/bootstrap launchers")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    own = ["--mca", "orte_tmpdir_base", mkdtemp(dir=_folders.name)]
    return ["mpirun", *root, *own, "--oversubscribe", "-n", str(ranks)]
