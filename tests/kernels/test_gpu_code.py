"""Tests of the code that the CUDA compiler makes of the kernels. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kernels import code_of_kernels as code

BUILD = Path(os.environ.get("BALLAST_BUILD", code.ROOT / "build" / "release"))

ONE_THREAD = {"normalize_kernel"}  # one thread of a block reads a whole sum into its local memory


def kernels() -> list[code.Kernel]:
    try:
        return [kernel for file in code.objects_in(BUILD) for kernel in code.kernels_of(file)]
    except FileNotFoundError as problem:
        pytest.skip(str(problem))


def test_no_kernel_spills_registers():
    found = kernels()
    if not found:
        pytest.skip("this build has no CUDA")
    assert len(found) > 50
    assert {kernel.name for kernel in found if kernel.local_bytes} <= ONE_THREAD


def test_a_kernel_that_spills_is_seen(tmp_path):
    if not kernels():
        pytest.skip("this build has no CUDA")
    source = tmp_path / "spills.cu"
    source.write_text("""
        __global__ void spills(float* x, const int* at) {
          float own[64] = {};
          for (int i = 0; i < 64; ++i) own[at[i]] += x[i];
          for (int i = 0; i < 64; ++i) x[i] = own[i];
        }
    """)
    subprocess.run(["nvcc", "-arch=sm_90", "-c", source, "-o", f"{source}.o"], check=True)
    [kernel] = code.kernels_of(Path(f"{source}.o"))
    assert (kernel.name, kernel.local_bytes >= 256) == ("spills", True)
