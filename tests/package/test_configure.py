"""Tests of what CMake says where CUDA, a package or the machine is not as Ballast needs it. Nothing is compiled."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CMAKE, NINJA = shutil.which("cmake"), shutil.which("ninja")
BARE_PATH = "/usr/bin:/bin"
PARTS = ["kernels", "offload", "optim", "zero", "examples", "benchmarks", "tests"]

pytestmark = pytest.mark.skipif(not CMAKE or not NINJA, reason="CMake or Ninja is not installed: .ci/bootstrap build")


def configure(folder: Path, lines: str, *options: str, **variables: str) -> tuple[int, str]:
    """Configure a project with these lines. Return the exit code, and what CMake printed with each run of spaces as one."""
    (folder / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.25)\nproject(stranger LANGUAGES NONE)\n{lines}")
    command = [CMAKE, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}", *options, "-S", folder, "-B", folder / "build"]
    without = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**without, **variables})
    return ended.returncode, " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.parametrize("cached", [[], ["-DCMAKE_CUDA_COMPILER=NOTFOUND"]], ids=["new", "after a failed search"])
@pytest.mark.parametrize("wanted", ["AUTO", "ON"])
def test_an_nvcc_that_is_not_on_the_path_and_cannot_compile_is_named(tmp_path: Path, cached: list[str], wanted: str) -> None:
    if shutil.which("nvcc", path=BARE_PATH):
        pytest.skip("the system has an nvcc of its own, which is found first")
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\necho 'error: unsupported GNU version! gcc versions later than 14 are not supported!' >&2\nexit 1\n"
    )
    nvcc.chmod(0o755)
    lines = f"set(BALLAST_CUDA {wanted})\nset(BALLAST_CUDA_ARCHITECTURES 90)\ninclude({ROOT}/.ci/cmake/cuda.cmake)\n"
    code, said = configure(tmp_path, lines, *cached, PATH=BARE_PATH, CUDA_HOME=str(tmp_path / "cuda"))
    assert (code != 0) == (wanted == "ON"), said
    assert f"{nvcc} cannot compile a program:" in said
    assert "gcc versions later than 14 are not supported!" in said
    assert "Set CUDAHOSTCXX" in said
    assert ("Building for CPUs only." in said) == (wanted == "AUTO")
    assert "no CUDA compiler" not in said


PACKAGES = {"fmt": "libfmt-dev", "TBB": "libtbb-dev", "Sodium": "libsodium-dev", "nlohmann_json": "nlohmann-json3-dev"}


@pytest.mark.parametrize("name, package", PACKAGES.items())
def test_a_missing_package_is_named_as_debian_names_it(tmp_path: Path, name: str, package: str) -> None:
    lines = f"include({ROOT}/.ci/cmake/dependencies.cmake)\nballast_find({name} REQUIRED)\n"
    code, said = configure(tmp_path, lines, f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON")
    assert code != 0
    assert f"Ballast needs {name}, which was not found." in said
    assert f"`apt-get install {package}`" in said
    assert "`.ci/bootstrap build`" in said


def test_each_required_package_has_its_name_in_debian() -> None:
    """A name without one gets CMake's message. Threads is part of the C library, CUDAToolkit was found with nvcc."""
    files = [ROOT / "CMakeLists.txt", *(file for part in PARTS for file in (ROOT / part).rglob("CMakeLists.txt"))]
    asked = re.compile(r"^ *(?:ballast_find|find_package)\((\w+) REQUIRED\)|^ *ballast_require\((\w+)\)", re.M)
    required = {found[1] or found[2] for file in files for found in asked.finditer(file.read_text())}
    table = (ROOT / ".ci" / "cmake" / "dependencies.cmake").read_text()
    assert required - {"Threads", "ballast"} == set(re.findall(r"^set\(ballast_package_(\w+) ", table, re.M))


def test_a_library_of_nvidia_is_searched_once() -> None:
    """Each search that fails prints a line. `cuda.cmake` searches before the folders that need the targets."""
    files = [
        *(ROOT / ".ci" / "cmake").glob("*.cmake"),
        *(file for part in PARTS for file in (ROOT / part).rglob("CMakeLists.txt")),
    ]
    text = "".join(file.read_text() for file in files)
    for library in ("cublas", "nccl"):
        assert len(re.findall(rf"^ *ballast_find_{library}\(\)", text, re.M)) == 1


@pytest.mark.parametrize(
    "system, compiler, version, refusal",
    [
        ("Darwin", "Clang", "17.0.0", "Ballast is built on Linux only, not on Darwin"),
        ("Windows", "GNU", "14.1.0", "Ballast is built on Linux only, not on Windows"),
        ("Linux", "GNU", "11.4.0", "Ballast needs GCC 12, Clang 14, or a newer one; c++ is GNU 11.4.0"),
        ("Linux", "Clang", "13.0.1", "Ballast needs GCC 12, Clang 14, or a newer one; c++ is Clang 13.0.1"),
        ("Linux", "GNU", "12.2.0", None),
        ("Linux", "Clang", "14.0.6", None),
        ("Linux", "IntelLLVM", "2024.1", None),  # this compiler is not tried, and not refused
    ],
)
def test_other_systems_and_old_compilers_are_refused(
    tmp_path: Path, system: str, compiler: str, version: str, refusal: str | None
) -> None:
    values = {"SYSTEM_NAME": system, "CXX_COMPILER_ID": compiler, "CXX_COMPILER_VERSION": version, "CXX_COMPILER": "c++"}
    lines = "".join(f"set(CMAKE_{name} {value})\n" for name, value in values.items())
    code, said = configure(tmp_path, f"{lines}include({ROOT}/.ci/cmake/requirements.cmake)\n")
    assert (code != 0) == (refusal is not None), said
    assert refusal is None or refusal in said


def test_the_build_type_of_a_project_that_contains_ballast_is_left_alone(tmp_path: Path) -> None:
    """Only the lines above the libraries are read, so that nothing is compiled or searched."""
    top = (ROOT / "CMakeLists.txt").read_text()
    (tmp_path / "ballast").mkdir()
    (tmp_path / "ballast" / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(ballast LANGUAGES NONE)\n"
        + re.search(r"^if\([^\n]*NOT CMAKE_BUILD_TYPE.*?^endif\(\)\n", top, re.M | re.S)[0]
    )
    lines = 'add_subdirectory(ballast)\nmessage(STATUS "build type: <$CACHE{CMAKE_BUILD_TYPE}>")\n'
    code, said = configure(tmp_path, lines)
    assert code == 0 and "build type: <>" in said, said
    assert "CMAKE_BUILD_TYPE Release CACHE" in top


def test_a_project_that_contains_ballast_sees_its_public_headers_alone(tmp_path: Path) -> None:
    lines = (
        "enable_language(CXX)\n"
        f"add_subdirectory({ROOT} ballast)\n"
        "get_target_property(folders ballast_zero INTERFACE_INCLUDE_DIRECTORIES)\n"
        'message(STATUS "folders: ${folders}<")\n'
    )
    code, said = configure(tmp_path, lines, "-DBALLAST_CUDA=OFF")
    assert code == 0, said
    [folders] = re.findall("folders: (.*?)<", said.replace("$<BUILD_INTERFACE:", ""))
    assert folders.split(";") == [f"{ROOT}/{part}/include>" for part in ("kernels", "optim", "zero")]
