"""Tests that the repository keeps the rules, and that every rule finds a planted violation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from structure import rules

REPOSITORY = Path(__file__).resolve().parents[2]

# A tree without violations. Each case below plants one.
CLEAN = {
    "kernels/CMakeLists.txt": "ballast_library(runtime SOURCES runtime/log.cpp)\n"
    "ballast_library(kernels SOURCES cpu.cpp LINKS PUBLIC ballast::runtime PRIVATE TBB::tbb)\n",
    "kernels/cast.h": "#pragma once\nvoid cast(int a, int b);\n",
    "kernels/cast_cpu.cpp": '#include <oneapi/tbb/parallel_for.h>\n#include "kernels/cast.h"\nvoid cast(int, int) {}\n',
    "kernels/cast_cuda.cu": '#include <cuda_fp16.h>\n#include "kernels/cast.h"\n__global__ void walk() {}\n',
    "kernels/runtime/device_cuda.cpp": "#include <cuda_runtime_api.h>\nvoid get(void** p) { cudaMalloc(p, 1); }\n",
    "kernels/runtime/environment.cpp": '#include <cstdlib>\nchar* path() { return std::getenv("P"); }\n',
    "kernels/runtime/log.cpp": '#include <cstdio>\nvoid log() { std::fputs("line", stderr); }\n',
    "kernels/include/ballast/view.h": "#pragma once\n#include <cstddef>\n",
    "zero/include/ballast/training.h": "#pragma once\n#include <ballast/view.h>\n",
    "offload/CMakeLists.txt": "ballast_library(offload SOURCES file.cpp LINKS PUBLIC ballast::runtime)\n",
    "offload/file.cpp": "void write_file();\n",
    "offload/io_uring.cpp": "#include <liburing.h>\n",
    "optim/CMakeLists.txt": "ballast_library(optim SOURCES rule.cpp LINKS PUBLIC ballast::kernels)\n",
    "optim/rule.cpp": '#include "optim/rule.h"\n',
    "optim/rule.h": '#pragma once\n#include "kernels/cast.h"\n',
    "zero/engine.cpp": '#include <ballast/training.h>\n#include "optim/rule.h"\n',
    "benchmarks/copy.cpp": "#include <CLI/CLI.hpp>\n#include <nlohmann/json.hpp>\nvoid show() { std::cout << 1; }\n",
    "python/ballast/__init__.py": "from ballast.torch.training.training import Training\n",
    "python/ballast/checks.py": "import ballast.sizes\n",
    "python/ballast/errors.py": "from ballast.checks import refuse\n",
    "python/ballast/sizes.py": "from ballast import _core\n",
    "python/ballast/torch/training/training.py": "from ballast.checks import refuse\n",
    "tests/CMakeLists.txt": "ballast_tests(zero LINKS ballast::zero SOURCES engine_test.cpp deep/plan_test.cpp)\n",
    "tests/emulated_cuda/CMakeLists.txt": "set(sources kernels/cast_cuda.cu kernels/runtime/device_cuda.cpp)\n",
    "tests/zero/engine_test.cpp": "#include <catch2/catch.hpp>\n",
    "tests/zero/deep/plan_test.cpp": "#include <catch2/catch.hpp>\n",
}

TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:"

# rule, file, line of the violation, text of the file
PLANTED = [
    ("top-level", "ballast-training-x1", 1, "state\n"),
    ("top-level", "notes.md", 1, "# Notes\n"),
    ("layering", "kernels/low.h", 2, '#pragma once\n#include "optim/rule.h"\n'),
    ("layering", "kernels/runtime/low.h", 1, '#include "kernels/cast.h"\n'),
    ("layering", "offload/ring.cpp", 1, '#include "optim/rule.h"\n'),
    ("layering", "optim/adam.cpp", 3, '// first\n\n  #  include "offload/file.h"\n'),
    ("layering", "zero/engine.cpp", 1, '#include "benchmarks/copy.h"\n'),
    ("layering", "attic/old.cpp", 1, "int x;\n"),
    ("public-api", "examples/trainer/main.cpp", 2, "#include <ballast/training.h>\n#include \"zero/comm/connect.h\"\n"),
    ("layering", "optim/adam.cpp", 1, "#include <ballast/training.h>\n"),
    ("layering", "kernels/include/ballast/view.h", 1, "#include <ballast/training.h>\n"),
    ("layering", "zero/include/ballast/engine.h", 1, "#pragma once\n"),  # the header is not listed
    ("include-path", "zero/engine.cpp", 1, '#include "engine.h"\n'),
    ("include-path", "zero/engine.cpp", 1, "#include <ballast/engine.h>\n"),
    ("include-path", "zero/engine.cpp", 1, '#include "kernels/include/ballast/view.h"\n'),
    ("public-headers", "zero/include/ballast/training.h", 1, '#include "optim/rule.h"\n'),
    ("public-headers", "zero/include/ballast/training.h", 1, "#include <fmt/format.h>\n"),
    ("public-headers", "kernels/include/ballast/view.h", 2, "#pragma once\n#include <cuda.h>\n"),
    ("cuda-includes", "optim/muon.cu", 1, '#include "optim/rule.h"\n'),
    ("cuda-includes", "zero/muon.cu", 1, "#include <ballast/training.h>\n"),
    ("links", "optim/CMakeLists.txt", 2, "\nballast_library(optim SOURCES rule.cpp LINKS ballast::offload)\n"),
    ("links", "kernels/runtime/CMakeLists.txt", 1, "target_link_libraries(ballast_runtime PRIVATE ballast_kernels)\n"),
    ("device-functions", "kernels/sum_math.h", 1, "constexpr int f(int x) { return std::countl_zero(x); }\n"),
    ("device-functions", "kernels/sum_math.h", 2, "// std::min()\nfloat f(float x) { return std::max<float>(x, 1); }\n"),
    ("device-functions", "kernels/number_walk.h", 1, "inline int f(int x) { return __builtin_clz(x); }\n"),
    ("vendor", "offload/record.cpp", 1, "#include <liburing.h>\n"),  # a second home
    ("vendor", "offload/io_uring.h", 1, "#include <liburing.h>\n"),  # a public header
    ("vendor", "zero/hash.cpp", 1, "#include <xxhash.h>\n"),
    ("vendor", "zero/hash.cpp", 1, "#include <sodium.h>\n"),
    ("vendor", "offload/pages.cpp", 1, "#include <numaif.h>\n"),
    ("vendor", "zero/engine.cpp", 1, "#include <nccl.h>\n"),
    ("vendor", "zero/engine.cpp", 1, '#include "gloo/context.h"\n'),
    ("vendor", "zero/engine.cpp", 1, "#include <cublas_v2.h>\n"),
    ("vendor", "zero/engine.cpp", 1, "#include <oneapi/dnnl/dnnl.hpp>\n"),
    ("vendor", "kernels/cast.h", 1, "#include <oneapi/tbb/parallel_for.h>\n"),
    ("vendor", "kernels/cast.h", 1, "#include <cuda_runtime.h>\n"),
    ("vendor", "zero/binding.cpp", 1, "#include <pybind11/pybind11.h>\n"),
    ("vendor", "python/engine.h", 1, "#include <pybind11/pybind11.h>\n"),
    ("vendor", "benchmarks/copy.cpp", 1, "#include <catch2/catch.hpp>\n"),
    ("vendor", "zero/plan.cpp", 1, "#include <nlohmann/json.hpp>\n"),
    ("vendor", "zero/plan.cpp", 1, "#include <CLI/CLI.hpp>\n"),
    ("home", "zero/pool.cpp", 2, "\nvoid f(void** p) { cudaMallocAsync(p, 1, nullptr); }\n"),
    ("home", "kernels/cast_cuda.cu", 1, "void f(void* p) { cudaHostRegister(p, 1, 0); cudaGetLastError(); }\n"),
    ("home", "zero/pool.cpp", 1, "void f(void* p) { cudaFreeHost(p); }\n"),
    ("home", "zero/rank.cpp", 1, 'auto rank = std::getenv("RANK");\n'),
    ("home", "tests/zero/engine_test.cpp", 1, 'auto rank = getenv("RANK");\n'),
    ("home", "zero/engine.cpp", 1, "void f() { std::cerr << 1; }\n"),
    ("home", "zero/engine.cpp", 1, 'void f() { printf("x"); }\n'),
    ("home", "kernels/cast_cuda.cu", 1, 'void f() { fmt::print("x"); }\n'),
    ("home", "offload/file.cpp", 1, 'void f() { fprintf(stderr, "x"); }\n'),
    ("file-size", "zero/plan.cpp", 701, "// a line\n" * 701),
    ("function-size", "zero/plan.cpp", 3, "namespace a {\n\nint f() {\n" + "  g();\n" * 59 + "}\n}\n"),
    ("function-size", "tests/test_x.py", 1, "def f():\n" + "    g()\n" * 60),
    ("parameters", "zero/plan.h", 2, "struct A {\nvoid f(int a, int b, int c, int d, int e, int g, int h);\n};"),
    ("parameters", "zero/plan.cpp", 1, "A::A(int a, int b, int c, int d, int e, int g, int h) : a_{a}, b_(b) {}\n"),
    ("parameters", "tests/test_x.py", 1, "def f(a, b, c, d, e, g, h): pass\n"),
    ("parameters", "python/ballast/api.py", 1, "def wrap(a, b, c, d, e, g, h=0): pass\n"),
    ("parameters", "python/ballast/api.py", 1, "def save(*, a=1, b=1, c=1, d=1, e=1, g=1, h=1): pass\n"),
    ("function-size", "python/ballast/api.py", 1, "def wrap():\n    'Wrap.'\n" + "    g()\n" * 60),
    ("emulated", "kernels/multiply_cuda.cu", 1, "__global__ void multiply() {}\n"),
    ("emulated", "kernels/cublas_scale.cpp", 1, "void scale() {}\n"),
    ("emulated", "zero/comm/nccl_reduce.cpp", 1, "void reduce() {}\n"),
    ("in-build", "tests/zero/forgotten_test.cpp", 1, "#include <catch2/catch.hpp>\n"),
    ("in-build", "tests/zero/plan_test.cpp", 1, "#include <catch2/catch.hpp>\n"),  # the listed one is in deep/
    ("unused-name", "zero/plan.cpp", 2, "int b;\nusing ::ballast::testing::b;\nint bb; // b\n"),
    ("unused-name", "zero/plan.cpp", 1, "namespace fs =\n    std::filesystem;\n"),
    ("message", "kernels/fill.cpp", 2, '\nrequire(ok, [] { return Problem{.what = "a fill was asked for"}; });\n'),
    ("message", "kernels/fill.cpp", 1, 'fail(Code::x, {.what = fmt::format("tile {} was to "  // why\n "be read", 1)});\n'),
    ("message", "offload/file.h", 1, 'auto why = R"(it goes on as ever)";\n'),
    ("message", "offload/file.cpp", 1, 'throw Error("the file was cut off");\n'),
    ("remedy", "offload/file.cpp", 1, 'fail(Code::bad_argument, {.what = "no tile"});\n'),
    ("remedy", "python/tile.py", 2, 'import ballast\nrefuse("no tile", where="here")\n'),
    ("message", "zero/comm/hub.cpp", 1, 'log->warning("rank 1, who waits");\n'),
    (
        "message",
        "kernels/fill.py",
        3,
        'def f():\n    """Nobody reads this."""\n    raise ValueError(f"{x} is to be " "read")\n',
    ),
    ("python-layers", "python/ballast/attic.py", 1, "import torch\n"),
    ("python-layers", "python/ballast/checks.py", 1, "from ballast.torch.training.training import Training\n"),
    ("python-layers", "python/ballast/checks.py", 2, "def f():\n    from ballast.torch.training import training\n"),
    ("python-layers", "python/ballast/checks.py", 3, f"{TYPING}\n    from ballast.torch.training.training import Training\n"),
    ("python-layers", "python/ballast/checks.py", 1, "import ballast\n"),
    ("python-circles", "python/ballast/sizes.py", 1, "from ballast.checks import refuse\n"),
    ("python-circles", "python/ballast/checks.py", 3, f"{TYPING}\n    from ballast import errors\n"),
    ("python-circles", "python/ballast/checks.py", 2, "def f():\n    import ballast.errors\n"),
    ("private-torch", "python/ballast/checks.py", 2, "import torch\ntorch._C._autograd._pop_saved_tensors_default_hooks()\n"),
    ("private-torch", "python/ballast/checks.py", 1, "from torch.utils._pytree import tree_map\n"),
    ("private-torch", "python/ballast/checks.py", 1, "from torch.optim.optimizer import _default_to_fused_or_foreach\n"),
    ("private-torch", "python/ballast/checks.py", 1, "import torch.utils._pytree\n"),
    ("private-torch", "python/ballast/checks.py", 2, "def f(tensor):\n    return tensor.untyped_storage()._cdata\n"),
    ("private-torch", "python/ballast/checks.py", 1, 'hooks = getattr(parameter, "_post_accumulate_grad_hooks")\n'),
    ("torch-gpu", "python/ballast/checks.py", 2, "import torch\ntorch.cuda.synchronize()\n"),
    ("torch-gpu", "python/ballast/checks.py", 1, 'is_gpu = device.type == "cuda"\n'),
    ("torch-gpu", "python/ballast/checks.py", 1, 'device = f"cuda:{gpu}"\n'),
    ("torch-gpu", "python/ballast/checks.py", 1, "from torch.cuda import synchronize\n"),
    ("torch-gpu", "python/ballast/checks.py", 1, "import torch.cuda\n"),
    ("torch-device", "python/ballast/checks.py", 2, "import torch\nvalues = torch.empty(3, dtype=torch.float32)\n"),
    ("developer-path", "README.md", 2, "# Ballast\nSee /" + "home/ann/ballast.\n"),
    ("developer-path", "CMakeLists.txt", 1, 'set(NCCL "/' + 'root/wheels/nccl")\n'),
]

# Files that look like violations but are none.
INNOCENT = {
    "zero/engine.cpp": """// std::cout << getenv("HOME") and #include <nccl.h> in a comment
/* #include <catch2/catch.hpp>
   cudaMalloc(p, 1); */
const char* text = "std::cerr << printf(cudaMalloc())";
const char* raw = R"(
#include <nccl.h>
getenv("x"))";
using a::b; namespace c = a; using enum a::E; using namespace a; b from = c::from;
const int big = 1'000'000; const char quote = '"'; int printed = snprintf(nullptr, 0, "x");
""",
    "zero/values.h": "constexpr int sizes[] = {1, 2, 3, 4, 5, 6, 7, 8};\nauto made = make(1, 2, 3, 4, 5, 6, 7, 8);\n",
    "tests/zero/engine_test.cpp": 'TEMPLATE_TEST_CASE("x", "[y]", int, long, short, char, float, double) {}\n',
    "tests/CMakeLists.txt": "# zero knows: ballast_tests(zero SOURCES nothing.cpp)\n" + CLEAN["tests/CMakeLists.txt"],
    "kernels/fill.cpp": """// It was asked for, nobody knows who goes on beside it.
auto a = "cannot fill: tile {} is read already"; auto b = "was"; auto c = "the record holds what was written";
""",
    "benchmarks/unchecked.cpp": 'auto a = "a tile was asked for";\n',
    "python/ballast/_torch_compat.py": "from torch.utils._pytree import tree_map\ntorch._foreach_copy_([], [])\n",
    "python/ballast/torch/gpu.py": 'import torch\nGPU = "cuda"\n',
    "python/ballast/sizes.py": '''"""Like torch.cuda."""  # "cuda"\nword = "CUDA"\n\n\ndef f():\n    """As cuda does."""\n''',
    "python/ballast/planning/result.py": "import torch\nfrom torch import nn\nself._torch = torch.nn.Linear\n",
    "python/paths.md": "https://example.org/home/page, $PREFIX/root/x, /tmp/x, /proc/self, kernels/home/x\n",
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_repository_keeps_the_rules():
    found = rules.violations(REPOSITORY)
    assert not found, "\n" + "\n".join(map(str, found))


def test_ruff_finds_nothing():
    pytest.importorskip("ruff", reason="ruff is not installed: .ci/bootstrap venv")
    ended = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", REPOSITORY], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_nothing_is_found_in_a_clean_tree(tmp_path):
    plant(tmp_path, CLEAN)
    assert rules.violations(tmp_path) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_files_that_git_ignores_are_not_judged(tmp_path):
    violation = {"zero/rank.cpp": 'auto rank = std::getenv("RANK");\n'}
    plant(tmp_path, CLEAN | violation | {".gitignore": "/venv/\n", "venv/zero/rank.cpp": violation["zero/rank.cpp"]})
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert {found.file for found in rules.violations(tmp_path)} == {"zero/rank.cpp"}  # untracked, but not ignored
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    (tmp_path / "zero" / "rank.cpp").unlink()  # its deletion is not added
    assert rules.violations(tmp_path) == []


def test_the_folders_that_the_documentation_tells_users_to_make_are_ignored():
    """`python3 -m venv venv`, `pip wheel --wheel-dir wheels`, and `portable_wheel.py ... portable` make them."""
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    assert {"/venv/", "/wheels/", "/portable/"} <= set(ignored)


@pytest.mark.parametrize("name", INNOCENT)
def test_code_that_only_looks_like_a_violation_passes(tmp_path, name):
    plant(tmp_path, CLEAN | {name: INNOCENT[name]})
    assert rules.violations(tmp_path) == []


@pytest.mark.parametrize(("rule", "name", "line", "text"), PLANTED, ids=lambda value: str(value).splitlines()[0][:40])
def test_a_planted_violation_is_found(tmp_path, rule, name, line, text):
    plant(tmp_path, CLEAN | {name: text})
    found = [str(violation) for violation in rules.violations(tmp_path)]
    assert any(violation.startswith(f"{name}:{line}: {rule}: ") for violation in found), found


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, *_ in PLANTED} == set(rules.RULES)


def test_every_vendor_and_every_home_has_a_planted_violation(tmp_path):
    plant(tmp_path, CLEAN)
    messages = []
    for rule, name, _, text in PLANTED:
        if rule in ("vendor", "home"):
            plant(tmp_path, CLEAN | {name: text})
            messages += [violation.message for violation in rules.violations(tmp_path)]
    for known in [*rules.house.VENDORS, *rules.house.HOMES]:
        assert any(message.startswith(known.name) for message in messages), known.name
