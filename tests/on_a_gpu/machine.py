"""Find the programs, Python, NVIDIA's wheels, the pack and the GPU of this machine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKED = ("pytest", "torchao")  # packages of the pack that steps import
ROOT = Path(__file__).resolve().parents[2]
CUDA_FOLDERS = [
    *(Path("/usr/local/cuda/bin"), Path("/usr/local/cuda/compute-sanitizer")),
    *sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True),
    *(Path("/opt/nvidia/compute-sanitizer"), Path("/usr/local/nvidia/bin")),
]


@dataclass(frozen=True)
class Machine:
    """Finds programs and libraries. `work` holds the build, the logs and the results."""

    work: Path
    pack: Path = ROOT / "build" / "on_a_gpu_pack"
    architectures: str = "90-real"
    emulated: Path | None = None  # a build with emulated GPUs, on which small models train

    @property
    def build(self) -> Path:
        return self.work / f"release-{self.architectures.replace(';', '-')}"

    @property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    @cached_property
    def no_gpu_because(self) -> str:
        """Return why there is no usable GPU, or an empty string."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "no GPU: there is no libcuda.so.1, the driver's library"
        count = ctypes.c_int(0)
        code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        if code != 0:
            return f"no GPU: the driver's library returns error {code}"
        return "" if count.value > 0 else "no GPU: the driver finds none"

    def program(self, name: str) -> str | None:
        """Return the path of a program on the PATH or in a CUDA toolkit."""
        places = [os.environ.get("PATH", ""), *map(str, CUDA_FOLDERS)]
        return shutil.which(name, path=os.pathsep.join(places))

    @cached_property
    def nvidia_wheels(self) -> Path | None:
        """Return the site-packages folder with NVIDIA's libraries, those that torch loads."""
        spec = importlib.util.find_spec("nvidia")
        folders = list(spec.submodule_search_locations or []) if spec else []
        return Path(folders[0]).parent if folders else None

    @cached_property
    def pybind11(self) -> Path | None:
        """Return the folder with the CMake files of pybind11 3: this Python's own, or that of the pack."""
        for place in (None, self.pack / "python" / "pybind11"):
            ask = "import pybind11; print(pybind11.__version__, pybind11.get_cmake_dir())"
            added = {} if place is None else {"PYTHONPATH": str(place)}
            asked = subprocess.run([sys.executable, "-c", ask], env={**os.environ, **added}, capture_output=True, text=True)
            version, _, folder = asked.stdout.strip().partition(" ")
            if asked.returncode == 0 and int(version.partition(".")[0]) >= 3:
                return Path(folder)
        return None

    @cached_property
    def python_headers(self) -> Path | None:
        """Return the folder of Python.h: this Python's own, or that of the pack for the same version."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        folders = [Path(sysconfig.get_path("include")), self.pack / "usr" / "include" / version]
        return next((folder for folder in folders if (folder / "Python.h").is_file()), None)

    @property
    def can_build_package(self) -> bool:
        return self.pybind11 is not None and self.python_headers is not None

    def has_module(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None or (self.pack / "python" / name / name).is_dir()

    def environment(self) -> dict[str, str]:
        """Return the environment of all steps. Packed Python packages are added only where this Python lacks them."""
        paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        lacking = [name for name in PACKED if importlib.util.find_spec(name) is None]
        paths += [str(self.pack / "python" / name) for name in lacking]
        return {
            **os.environ,
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), *map(str, CUDA_FOLDERS)]),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "BALLAST_BUILD": str(self.build),
        }

    def cmake_options(self) -> list[str]:
        """Return the options of the build. Warnings are no errors: this may be the first time that a compiler sees the code."""
        given = {
            "CMAKE_BUILD_TYPE": "Release",
            "BALLAST_CUDA": "ON",
            "BALLAST_CUDA_ARCHITECTURES": self.architectures,
            "CMAKE_CUDA_FLAGS": "-lineinfo",  # compute-sanitizer needs it; the code is the same
            "BALLAST_INSTALL": "OFF",
            "BALLAST_PYTHON": "OFF",
            "Python_EXECUTABLE": sys.executable,
        }
        if (self.pack / "usr").is_dir():
            given["CMAKE_PREFIX_PATH"] = str(self.pack / "usr")
        if (nvcc := self.program("nvcc")) is not None:
            given["CMAKE_CUDA_COMPILER"] = nvcc
        if self.nvidia_wheels is not None:
            given["BALLAST_NVIDIA_WHEELS"] = str(self.nvidia_wheels)
        if self.can_build_package:
            given["BALLAST_PYTHON"] = "ON"
            given["pybind11_ROOT"] = str(self.pybind11)
            given["Python_INCLUDE_DIR"] = str(self.python_headers)
            if self.python_headers.is_relative_to(self.pack):  # Debian's pyconfig.h includes another one, by its path from here
                given["CMAKE_CXX_FLAGS"] = f"-isystem {self.python_headers.parent}"
        return [f"-D{name}={value}" for name, value in given.items()]


def unpack_built(root: Path = ROOT) -> str:
    """Extract what `pack_built` has packed, unless that is done, and let the path at which it was compiled lead here. Return
    what is missing, or an empty string."""
    archive, compiled_at = root / "build" / "on_a_gpu_built.tar.xz", root / "build" / "on_a_gpu" / "compiled_at.txt"
    if archive.exists() and not compiled_at.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(root, filter="fully_trusted")  # a file of our own, with links
    if not compiled_at.exists():
        return ""
    there = Path(compiled_at.read_text().strip())
    if there.exists() and there.samefile(root):
        return ""
    try:
        there.parent.mkdir(parents=True, exist_ok=True)
        there.symlink_to(root)
    except OSError as error:
        return f"the packed programs look for their libraries in {there}, which cannot lead here: {error}"
    return ""
