"""The design of the source tree as data: layers, homes and limits. Change the design here.

In the patterns of files, `*` also matches slashes: "offload/*.cpp" is every .cpp file below offload/.
"""

from typing import NamedTuple

# Each folder with C++ or CUDA sources, and the folders that it may include and link. It may also use what those may use.
LAYERS = {
    "kernels/runtime": [],
    "kernels/simd": ["kernels/runtime"],
    "kernels": ["kernels/runtime", "kernels/simd"],
    "offload": ["kernels"],
    "optim": ["kernels"],
    "zero/comm": ["kernels"],
    "zero/plan": ["offload", "optim"],
    "zero/engine": ["zero/comm", "zero/plan"],
    "zero/runs": ["zero/engine", "zero/checkpoint"],
    "zero/checkpoint": ["zero/comm", "zero/plan"],
    "zero": ["zero/runs", "zero/checkpoint"],
    "python": ["zero"],
    "examples": ["zero"],
    "benchmarks": ["zero", "examples"],
    "tests": ["zero", "benchmarks"],
}

# The headers that are installed, as <ballast/NAME>, and the layer that implements each. They include each other and the
# standard library only. All other headers are private.
PUBLIC_FOLDERS = ["kernels/include/ballast", "optim/include/ballast", "zero/include/ballast"]
PUBLIC_HEADERS = {
    "error.h": "kernels/runtime",
    "log.h": "kernels/runtime",
    "memory.h": "kernels/runtime",
    "view.h": "kernels/runtime",
    "state_format.h": "kernels",
    "optim.h": "optim",
    "comm.h": "zero/comm",
    "model.h": "zero/plan",
    "placement.h": "zero/plan",
    "planner.h": "zero/plan",
    "schedule.h": "zero/plan",
    "lease.h": "zero/engine",
    "local_state.h": "zero/plan",
    "records.h": "zero/engine",
    "step.h": "zero/engine",
    "joint_runs.h": "zero/runs",
    "safetensors.h": "zero",
    "tensor_state.h": "zero",
    "training_state.h": "zero",
    "training.h": "zero",
}

# What GPUs run is in these headers. nvcc compiles a host function that is called there to nothing, without a message, if the
# caller is constexpr. So they call no other function of the standard library than these.
DEVICE_CODE = ["kernels/*_math.h", "kernels/*octet.h", "kernels/number_*.h", "kernels/simd/scalar.h"]
DEVICE_FUNCTIONS = {"bit_cast", "memcpy", "assume_aligned"}

# The modules of python/ballast, from bottom to top. A module may import modules of its own group and of the groups before it,
# but not in a circle, even inside functions and under TYPE_CHECKING. Patterns match names without "ballast.". The package
# itself, which imports all public names, is "".
PYTHON_PACKAGE = "python/ballast"
PYTHON_EXTENSION = "_core"
PYTHON_LAYERS = {
    "foundation": [
        *("errors", "checks", "schema", "ranks", "sizes"),
        *("safetensors_format", "json_reader", "new_files"),
    ],
    "planning": [
        *("planning", "planning.*", "tiers", "options"),
        *("step_options", "wrap_options"),
        *("formats", "models", "models.*"),
        "deepspeed_config",
        *("outer", "outer.options", "outer.fragments"),
    ],
    "torch": [
        *("_torch_compat", "torch", "torch.gpu", "torch.calls.hooks", "torch.chunks"),
        *("torch.parts", "torch.process_groups"),
    ],
    "parameters": ["torch.memory", "torch.parameters", "torch.parameters.*"],
    "calls": ["torch.calls", "torch.calls.*"],
    "gradients": ["torch.gradients", "torch.gradients.*"],
    "updates": ["torch.updates", "torch.updates.*"],
    "activations": ["torch.activations", "torch.activations.*"],
    "outer": [
        *("outer.hosts", "outer.optimizer"),
    ],
    "training": [
        *("torch.training", "torch.training.*"),
        *("torch.optimizer", "torch.typing"),
    ],
    "functions": [
        *("checkpoint", "checkpoint.*", "api", "step_reports"),
    ],
    "package": [""],
    "integrations": ["integrations", "integrations.*"],
    "tools": ["tools", "tools.*", "__main__"],
}

# The files and folders that may be next to these at the top: those that tools look for there, and scripts that users run.
TOP = {"CMakeLists.txt", "CMakePresets.json", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"}
TOP |= {"CHANGELOG.md", "CITATION.cff", "SECURITY.md", "docs", "mkdocs.yml", ".github", ".pre-commit-config.yaml"}
TOP |= {"quickstart", "run-benchmarks", "run-tests", ".ci", ".clang-format", ".clang-tidy", ".gitignore"}

# nvcc takes 2 s for a .cu file that includes only these, and 6 s for one that includes higher layers.
CUDA_SOURCES_MAY_INCLUDE = ["kernels", "examples/llama"]

# Stand-ins of CUDA, NCCL and cuBLAS: their functions have the names and the parameters of those libraries.
EMULATION = "tests/emulated_cuda/*"

# The sources that are compiled only with CUDA, NCCL or cuBLAS. The emulation compiles all of them, except those that find the
# real libraries.
CUDA_SOURCES = [
    f"{folder}/*{kind}" for folder in ("kernels", "zero", "examples") for kind in (".cu", "_cuda.cpp", "_cublas.cpp")
]
CUDA_SOURCES += ["kernels/cublas*.cpp", "zero/comm/nccl*.cpp"]
NOT_EMULATED = ["kernels/cublas_calls.cpp", "zero/comm/nccl_calls.cpp", "*_absent.cpp"]

class Vendor(NamedTuple):
    """A library that is not ours. Only the files of its home may include its headers."""

    name: str
    header: str  # a regular expression that matches the full path of the #include
    home: list[str]
    one_file: bool = False

VENDORS = [
    Vendor("liburing", r"liburing(\.h|/.*)", ["offload/*.cpp"], one_file=True),
    Vendor("xxHash", r"xxhash\.h|xxh3\.h", ["offload/checksum*.cpp"]),
    Vendor("libnuma", r"numa(if)?\.h", ["kernels/runtime/*.cpp"], one_file=True),
    Vendor("NCCL", r"nccl.*\.h", ["zero/comm/*nccl*"]),
    Vendor("Gloo", r"gloo/.*", ["zero/comm/*gloo*"]),
    Vendor("libsodium", r"sodium(\.h|/.*)", ["zero/comm/admission.cpp"]),
    Vendor("cuBLAS", r"cublas.*", ["examples/llama/*", "kernels/*cublas*"]),
    Vendor("oneDNN", r"(oneapi/dnnl/)?dnnl.*", ["examples/llama/*.cpp"], one_file=True),
    Vendor("oneTBB", r"(oneapi/)?tbb(/.*|\.h)", ["kernels/*_cpu.cpp", "examples/llama/*_cpu.cpp"]),
    Vendor("CUDA", r"(cuda|cub/|cooperative_groups|nvtx|nvml).*", ["*.cu", "*.cuh", "kernels/runtime/*cuda*"]),
    Vendor("pybind11", r"pybind11/.*", ["python/bindings/*", "benchmarks/harness/python_interface.cpp"]),
    Vendor("Catch2", r"catch2/.*", ["tests/*"]),
    Vendor("nlohmann-json", r"nlohmann/.*", ["zero/checkpoint/json_value.h", "benchmarks/*", "examples/*"]),
    Vendor("CLI11", r"CLI/.*", ["benchmarks/*", "examples/*"]),
]

class Home(NamedTuple):
    """Something that is done in one place. Only the files of its home may contain the words."""

    name: str
    words: str  # a regular expression, searched in code without comments and strings
    home: list[str]

HOMES = [
    Home(
        "raw GPU or pinned memory",
        r"\bcuda(Malloc\w*|HostAlloc|HostRegister|HostUnregister|Free\w*)\s*\(|\bcuMem(Alloc|Free|Create)\w*\s*\(",
        ["kernels/runtime/device_cuda.cpp", "examples/llama/maths_cuda.cu", EMULATION],
    ),
    Home("environment variable", r"\b(secure_)?getenv\s*\(", ["kernels/runtime/environment.cpp"]),
    Home(
        "printing",
        r"\bstd::(cout|cerr|clog|print|println)\b|\bstd(out|err)\b"
        r"|\bfmt::print(ln)?\s*\(|\bv?printf\s*\(|\bput(s|char)\s*\(|\bperror\s*\(",
        ["kernels/runtime/log.cpp", "examples/*", "benchmarks/*", "tests/*"],
    ),
]

# The folders whose messages are checked against the forms below.
CHECKED_MESSAGES = ["kernels", "offload", "optim", "zero", "python", "examples"]
# The folders with messages that users read.
SOURCES_WITH_MESSAGES = ["kernels", "offload", "optim", "zero", "python", "examples"]

# A message that opens with its subject and a verb in the past tense directly after it.
_SUBJECT = r"^(?:an?|the|this|that|some|no|all|\{\}|\w+ \{\})"
_PAST_OPENING = _SUBJECT + r"(?: (?!is\b|are\b|has\b|have\b|that\b|what\b|which\b|than\b)[\w{}-]+){0,4}? (?:was|were)\b"

# Maps a regular expression that no message may match to what the message should say instead. A message has the form
# "cannot VERB OBJECT: REASON", in the present tense, with the subject first.
OLD_FORMS = {
    r"\b(was|were|is|are) to (be|have)\b": 'the present tense: "cannot reload: ..."',
    r"\bask(s|ed)? for\b": '"request", or the call that is made',
    r"\bwho\b": '"a rank that", "the process that"',
    r"\bwhoever\b": '"the caller", "the user", "a rank"',
    r"\bnobody\b": '"no rank", "no process"',
    r"\beverybody\b": '"all ranks"',
    r"\bbeside\b": '"next to", "as well as", "relative to"',
    r"\balike\b": '"the same", "both"',
    r"\bas ever\b": '"as before"',
    r"\b(go|goes|going|went) on\b": '"continues", "resumes"',
    _PAST_OPENING: "the present tense",
}
# The file that may use private names of torch: those below torch that begin with an underscore, and these of its objects.
TORCH_COMPAT = "python/ballast/_torch_compat.py"
PRIVATE_TO_TORCH = {"_cdata", "_schema", "_make_wrapper_subclass", "_get_active_ddp_module", "_get_default_store"}
PRIVATE_TO_TORCH |= {"_use_count", "_post_accumulate_grad_hooks", "_opt_called", "_wrapped_by_lr_sched"}

# The file of the package that may name torch's type of GPUs, and torch's module for them.
TORCH_GPU = "python/ballast/torch/gpu.py"
TORCH_FACTORIES = {f"torch.{name}" for name in ("arange", "as_tensor", "empty", "full", "ones", "rand", "tensor", "zeros")}

FILE_LINES = 700
FUNCTION_LINES = 60
PARAMETERS = 6

# Paths that exist on one person's machine only.
DEVELOPER_PATH = r"(?<![\w.$}])/(?:home|Users|root|work|workspace|mnt)/\w"

SIZED_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".cmake", ".txt", ""}
CODE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
TEXT_SUFFIXES = SIZED_SUFFIXES | {".md", ".json", ".toml", ".supp", ".sh", ".yml"}
# Ignored folders. In a git worktree, .git is a file.
IGNORED = {"build", "node_modules", ".git", ".venv", "__pycache__"}
IGNORED |= {".cache", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
