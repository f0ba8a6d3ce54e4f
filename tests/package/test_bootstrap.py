"""Tests of .ci/bootstrap for users who may not install packages. It runs in a copy, with stand-ins of apt-get and others."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["bash", "cat", "dirname", "env", "sed"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of .ci/bootstrap, and a PATH in `bin` with these tools, without root, sudo and mpirun."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "bootstrap", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is not installed"))
    for name, answer in {"id": "echo 1000", "apt-get": "exit 100"}.items():
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\n{answer}\n")
        script.chmod(0o755)
    return tmp_path


def bootstrap(copy: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {"PATH": str(copy / "bin")}
    return subprocess.run([copy / ".ci" / "bootstrap", *arguments], capture_output=True, text=True, env=environment)


def test_launchers_that_cannot_be_installed_are_a_warning(copy: Path) -> None:
    ended = bootstrap(copy, "launchers")
    assert ended.returncode == 0, ended.stderr
    assert "missing: openmpi-bin" in ended.stdout
    assert "please run this as root" in ended.stderr
    assert "without these, tests that start ranks with them are skipped" in ended.stderr


def test_drive_packages_that_cannot_be_installed_are_an_error(copy: Path) -> None:
    if shutil.which("fio", path="/usr/sbin:/sbin"):
        pytest.skip("fio is in a folder of the administrator's")
    ended = bootstrap(copy, "drive")
    assert ended.returncode == 1
    assert "please run this as root" in ended.stderr


@pytest.mark.skipif(not Path("/usr/sbin/slurmctld").exists(), reason="Slurm is not installed: .ci/bootstrap launchers")
def test_a_command_of_the_administrator_is_found(copy: Path) -> None:
    """Ordinary users have no /usr/sbin in their PATH, where slurmctld is."""
    assert "slurm-wlm" not in bootstrap(copy, "--dry-run", "launchers").stdout
