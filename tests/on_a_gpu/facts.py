"""Print what a build and a run depend on: one line for each fact, `== NAME: VALUE`. A missing thing is a fact, too."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from on_a_gpu.findings import figures_line
from on_a_gpu.host import memory_of_kernel
from on_a_gpu.machine import ROOT, Machine

GPU_FIELDS = (
    "name,compute_cap,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.max.mem,power.limit"
)


def output_of(program: str | None, *arguments: str) -> str:
    """Return what a program prints, on one line, or why it does not."""
    if program is None:
        return "missing"
    try:
        ran = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)  # torch is large
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    text = " | ".join(line.strip() for line in (ran.stdout or ran.stderr).splitlines() if line.strip())
    return text if ran.returncode == 0 else f"failed with exit code {ran.returncode}: {text}"


def first_version(program: str | None) -> str:
    return output_of(program, "--version").partition(" | ")[0]


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def memory() -> str:
    return f"{gibibytes(memory_of_kernel('MemAvailable'))} available of {gibibytes(memory_of_kernel('MemTotal'))}"


def locked_memory() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return ", ".join("unlimited" if limit == resource.RLIM_INFINITY else gibibytes(limit) for limit in (soft, hard))


def found(folders: list[Path], *names: str) -> str:
    places = [folder / name for folder in folders for name in names if (folder / name).exists()]
    return str(places[0]) if places else f"missing: {names[0]}"


def torch() -> str:
    ask = "import torch; print(torch.__version__, 'CUDA', torch.version.cuda, 'GPU', torch.cuda.is_available())"
    return output_of(sys.executable, "-c", ask).rpartition(" | ")[2]


def text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def toolkit(machine: Machine) -> Iterator[tuple[str, Callable[[], str]]]:
    nvcc = machine.program("nvcc")
    # A wrapper may start nvcc; its own file then tells where the toolkit is.
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    folders = [home / inner for home in homes for inner in ("include", "lib64", "targets/x86_64-linux/include")]
    wheels = [] if machine.nvidia_wheels is None else [machine.nvidia_wheels / "nvidia"]
    wheels += [Path("/usr/include"), Path("/usr/lib/x86_64-linux-gnu")]
    yield "nvcc", lambda: output_of(nvcc, "--version").rpartition(" | ")[2]
    yield "nvtx3", lambda: found(folders, "nvtx3/nvToolsExt.h")
    yield "cudart_static", lambda: found(folders, "libcudart_static.a")
    yield "compute-sanitizer", lambda: first_version(machine.program("compute-sanitizer"))
    yield "NCCL's header", lambda: found([*wheels, *folders], "nccl/include/nccl.h", "nccl.h")
    yield "cuBLAS's header", lambda: found([*wheels, *folders], "cu13/include/cublas_v2.h", "cublas_v2.h")


def facts(machine: Machine) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names of facts with the functions that find them, those that decide most first."""
    yield "GPU", lambda: machine.no_gpu_because or "usable"
    yield "nvidia-smi", lambda: output_of(shutil.which("nvidia-smi"), f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    yield from toolkit(machine)
    yield "g++", lambda: first_version(shutil.which("g++"))
    yield "cmake", lambda: first_version(shutil.which("cmake"))
    yield "ninja", lambda: first_version(shutil.which("ninja"))
    yield "python", lambda: f"{platform.python_version()} at {sys.executable}"
    yield "Python.h", lambda: str(machine.python_headers or "missing")
    yield "pybind11", lambda: str(machine.pybind11 or "missing")
    yield "torch", torch
    yield "pytest", lambda: output_of(sys.executable, "-c", "import pytest; print(pytest.__version__, pytest.__file__)")
    yield "pack", lambda: " | ".join(text_of(str(machine.pack / name)) for name in ("origin.txt", "commit.txt"))
    yield "cores", lambda: str(machine.cores)
    yield "memory", memory
    yield "ulimit -l (soft, hard)", locked_memory
    yield "disk", lambda: f"{gibibytes(shutil.disk_usage(ROOT).free)} free"
    yield "huge pages", lambda: text_of("/sys/kernel/mm/transparent_hugepage/enabled")
    yield "io_uring_disabled", lambda: text_of("/proc/sys/kernel/io_uring_disabled")
    yield "system", lambda: f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.release()}, {os.uname().machine}"


PUBLISHED = ("nvidia-smi", "torch", "cores", "memory", "system")  # what a reader of the figures needs


def main() -> None:
    found = {}
    for name, find in facts(Machine(ROOT / "build" / "on_a_gpu")):
        try:
            value = find()
        except Exception as error:  # the other facts are still of use
            value = f"failed: {error!r}"
        print(f"== {name}: {value}", flush=True)
        found[name] = value
    print(figures_line("machine", {name: found[name] for name in PUBLISHED}))


if __name__ == "__main__":
    main()
