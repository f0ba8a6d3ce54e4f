"""Tests of how the scripts for users configure the build. They run in a copy, with stand-ins of .ci/bootstrap and cmake."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"run-benchmarks": ["kernels"], "docs/serve": ["build"]}


def options_of_cmake(folder: Path, script: str) -> list[str]:
    """Return the options with which the script configures. The stand-in fails, which ends each script."""
    stand_ins = {"bin/cmake": f'#!/bin/sh\nprintf "%s\\n" "$@" >{folder}/options\nexit 1\n', ".ci/bootstrap": "#!/bin/sh\n"}
    for name, text in stand_ins.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    copied = folder / script
    copied.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / script, copied)
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    ended = subprocess.run([copied, *SCRIPTS[script]], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode != 0
    return (folder / "options").read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_warning_of_a_new_compiler_stops_no_user(tmp_path: Path, script: str) -> None:
    assert "-DBALLAST_WARNINGS_AS_ERRORS=OFF" in options_of_cmake(tmp_path, script)


def test_the_build_of_a_developer_is_not_made_again(tmp_path: Path) -> None:
    """./run-tests configures the same folder with warnings as errors; other options would compile all of it again."""
    (tmp_path / "build" / "release").mkdir(parents=True)
    (tmp_path / "build" / "release" / "CMakeCache.txt").write_text("BALLAST_WARNINGS_AS_ERRORS:BOOL=ON\n")
    assert "-DBALLAST_WARNINGS_AS_ERRORS=ON" in options_of_cmake(tmp_path, "run-benchmarks")


ARCHITECTURES = "--config-settings=cmake.define.BALLAST_CUDA_ARCHITECTURES="
CUDA = "--config-settings=cmake.define.BALLAST_CUDA="


@pytest.mark.parametrize(
    "gpus, arguments, expected",
    [
        ("", [], [f"{CUDA}OFF"]),
        ("", ["--cuda"], [f"{CUDA}ON"]),
        ("9.0\\n8.0\\n9.0\\n", [], [f"{ARCHITECTURES}80-real;90-real"]),
        ("12.0\\n", ["--cuda"], [f"{ARCHITECTURES}120-real", f"{CUDA}ON"]),
    ],
)
def test_quickstart_compiles_cuda_for_the_gpus_that_are_there(
    tmp_path: Path, gpus: str, arguments: list[str], expected: list[str]
) -> None:
    stand_ins = {
        "bin/nvidia-smi": f'printf "{gpus}"' if gpus else "exit 127",
        ".ci/bootstrap": "",
        "env/bin/python": f'echo "$@" >>{tmp_path}/calls',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / "quickstart", tmp_path)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": f"{tmp_path}/env"}
    subprocess.run([tmp_path / "quickstart", *arguments], check=True, capture_output=True, env=environment, timeout=60)
    [install] = [line for line in (tmp_path / "calls").read_text().splitlines() if "build-dir" in line]
    assert [word for word in install.split() if "CUDA" in word] == expected


@pytest.mark.parametrize(
    "package, file", [("torch", ".github/workflows/ci.yml"), ("clang-format", "CONTRIBUTING.md")], ids=["torch", "clang-format"]
)
def test_a_version_that_is_named_twice_is_the_same(package: str, file: str) -> None:
    pinned = re.findall(rf'^\w+="{package}==([\d.]+)"', (ROOT / ".ci" / "bootstrap").read_text(), re.M)
    assert len(pinned) == 1
    assert re.findall(rf"{package}==([\d.]+)", (ROOT / file).read_text()) == pinned
