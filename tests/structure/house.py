"""The shape of the house: which folder may know which, and where each thing lives. Change the design here.

In the patterns of files, `*` also crosses folders: "offload/*.cpp" is every .cpp file below offload/.
"""

from typing import NamedTuple

# Each folder that holds C++ or CUDA, and those it may include and link. What these may reach, it may reach too.
LAYERS = {
    "kernels/runtime": [],
    "kernels/simd": ["kernels/runtime"],
    "kernels": ["kernels/runtime", "kernels/simd"],
    "offload": ["kernels"],
    "optim": ["kernels"],
    "zero/comm": ["kernels"],
    "zero/plan": ["offload", "optim"],
    "zero/engine": ["zero/comm", "zero/plan"],
    "zero": ["zero/engine"],
    "python": ["zero"],
    "examples": ["zero"],
    "benchmarks": ["zero", "examples"],
    "tests": ["zero", "benchmarks"],
}

# What lies beside those folders at the top: what tools look for there, and the scripts that everybody types.
TOP = {"CMakeLists.txt", "CMakePresets.json", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"}
TOP |= {"CHANGELOG.md", "CITATION.cff", "SECURITY.md", "docs", "mkdocs.yml", ".github", ".pre-commit-config.yaml"}
TOP |= {"quickstart", "run-benchmarks", "run-tests", ".ci", ".clang-format", ".clang-tidy", ".gitignore"}

# nvcc takes 2 s for a .cu file that includes only this, and 6 s for one that includes what lies above.
CUDA_SOURCES_MAY_INCLUDE = ["kernels", "benchmarks/gpt"]


class Vendor(NamedTuple):
    """A library that is not ours: whoever includes its headers must be one of the home's files."""

    name: str
    header: str  # a regular expression for the whole path between the brackets of #include
    home: list[str]
    one_file: bool = False


VENDORS = [
    Vendor("liburing", r"liburing(\.h|/.*)", ["offload/*.cpp"], one_file=True),
    Vendor("xxHash", r"xxhash\.h|xxh3\.h", ["offload/checksum_walk.h"]),
    Vendor("libnuma", r"numa(if)?\.h", ["kernels/runtime/*.cpp"], one_file=True),
    Vendor("NCCL", r"nccl.*\.h", ["zero/comm/*nccl*.cpp"], one_file=True),
    Vendor("Gloo", r"gloo/.*", ["zero/comm/*gloo*.cpp"], one_file=True),
    Vendor("cuBLAS", r"cublas.*", ["benchmarks/gpt/*", "optim/*.cpp", "optim/*.cu"]),
    Vendor("oneDNN", r"(oneapi/dnnl/)?dnnl.*", ["benchmarks/gpt/*.cpp"], one_file=True),
    Vendor("oneTBB", r"(oneapi/)?tbb(/.*|\.h)", ["kernels/*_cpu.cpp"]),
    Vendor("CUDA", r"(cuda|cub/|cooperative_groups|nvtx|nvml).*", ["*.cu", "*.cuh", "kernels/runtime/*cuda*"]),
    Vendor("pybind11", r"pybind11/.*", ["python/bindings/*"]),
    Vendor("Catch2", r"catch2/.*", ["tests/*"]),
    Vendor("nlohmann-json", r"nlohmann/.*", ["benchmarks/*"]),
    Vendor("CLI11", r"CLI/.*", ["benchmarks/*"]),
]


class Home(NamedTuple):
    """Something that is done in one place: whoever writes the words must be one of the home's files."""

    name: str
    words: str  # a regular expression, searched in code without comments and strings
    home: list[str]


HOMES = [
    Home(
        "raw GPU or pinned memory",
        r"\bcuda(Malloc\w*|HostAlloc|HostRegister|HostUnregister|Free\w*)\s*\(|\bcuMem(Alloc|Free|Create)\w*\s*\(",
        ["kernels/runtime/device_cuda.cpp"],
    ),
    Home("environment variable", r"\b(secure_)?getenv\s*\(", ["kernels/runtime/environment.cpp"]),
    Home(
        "printing",
        r"\bstd::(cout|cerr|clog|print|println)\b|\bstd(out|err)\b"
        r"|\bfmt::print(ln)?\s*\(|\bv?printf\s*\(|\bput(s|char)\s*\(|\bperror\s*\(",
        ["kernels/runtime/log.cpp", "benchmarks/*", "tests/*"],
    ),
]

FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 6

# Paths that exist on one person's machine only.
DEVELOPER_PATH = r"(?<![\w.$}])/(?:home|Users|root|work|workspace|mnt)/\w"

SIZED_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".cmake", ".txt", ""}
CODE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
TEXT_SUFFIXES = SIZED_SUFFIXES | {".md", ".json", ".toml", ".supp", ".sh", ".yml"}
# Folders, and what is a file where git keeps several working trees.
IGNORED = {"build", "node_modules", ".git", ".venv", "__pycache__"}
IGNORED |= {".cache", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
