"""The steps of `run`, in their order: what tells the most comes first, and what the emulation of CUDA has tested comes last.
Each has an estimate for an H200 where all is compiled; test_steps.py adds them up to two calls, of 8 and of 5 minutes."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from on_a_gpu.cases import CASES
from on_a_gpu.machine import ROOT, Machine
from on_a_gpu.tiers import losses_of

RUNTIME = ["test_runtime"]
ENGINE = ["test_offload", "test_comm", "test_zero"]
PACKAGE = ["_core"]
TRAINER = ["llama", "benchmark_training", "test_llama"]
RATES = ["benchmark_gpu", "benchmark_kernels"]

QUICK = "[gpu]~*many elements*~*more elements*~*orthogonalizes*"  # tests of kernels that compute-sanitizer runs in seconds


@dataclass(frozen=True)
class Step:
    """A command with a limit, and what it needs. `product` is a file without which the step does not count as finished."""

    name: str
    about: str
    limit_s: int
    command: tuple[str, ...]
    estimate_s: int = 0  # it does not begin with less time left
    after: str = ""  # the step that must have passed
    needs_gpu: bool = True
    program: str = ""  # a program that must be there
    module: str = ""  # a module of Python that must be there
    product: Path | None = None


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def all_steps(machine: Machine) -> list[Step]:
    early, late = trainings(machine), tests(machine)
    return [
        Step("facts", "what the machine has", 60, python("-m", "on_a_gpu.facts"), 8, needs_gpu=False),
        host(machine, "memory", "memory in pieces of 4 GiB to 110 GiB, and a stream through it", 110, 24),
        *([] if machine.emulated else builds(machine)),
        quick_kernels(machine),
        *trainer(machine),
        *rates(machine),
        host(machine, "drive", "raw writes and reads of the drive", 6, 10),
        *early,
        *late,
        driver_messages(),
    ]


def configuring(machine: Machine) -> Step:
    command = ("cmake", "-S", str(ROOT), "-B", str(machine.build), "-G", "Ninja", *machine.cmake_options())
    product = machine.build / "build.ninja"
    return Step("configure", "CMake, for the architectures of --architectures", 120, command, needs_gpu=False, product=product)


def host(machine: Machine, what: str, about: str, gib: int, estimate_s: int) -> Step:
    size = str(1 if machine.emulated else gib)
    command = python("-m", "on_a_gpu.host", what, "--gib", size, "--work", str(machine.work / "drive"))
    return Step(what, about, 3 * estimate_s, command, estimate_s, needs_gpu=False, module="torch")


def building(machine: Machine, name: str, targets: list[str], product: str) -> Step:
    command = ("cmake", "--build", str(machine.build), "--parallel", str(machine.cores), "--target", *targets)
    return Step(
        f"build-{name}",
        f"compile {', '.join(targets)}",
        400,
        command,
        after="configure",
        needs_gpu=False,
        product=machine.build / product,
    )


def building_all(machine: Machine) -> Step:
    """Return the step that compiles all programs together, as far as it can: the steps after it tell which are missing."""
    targets = [*RUNTIME, *ENGINE, *(PACKAGE if machine.can_build_package else []), *TRAINER, *RATES]
    command = ("cmake", "--build", str(machine.build), "--parallel", str(machine.cores), "--target", *targets)
    about = "compile all other programs at once"
    return Step("build-all", about, 400, (*command, "--", "-k", "0"), after="configure", needs_gpu=False)


def ctest(machine: Machine, *choice: str, processes: int = 6) -> tuple[str, ...]:
    build, parallel = str(machine.build), str(min(processes, machine.cores))
    limits = ("--no-tests=error", "--timeout", "60", "--parallel", parallel)
    return ("ctest", "--test-dir", build, "-L", "gpu", *choice, "--output-on-failure", *limits)


def builds(machine: Machine) -> list[Step]:
    """Return the steps that compile: the kernels alone, then all together, and then each part again, which tells what is
    missing. What `pack_built` has packed has passed."""
    extension = f"python/ballast/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    return [
        configuring(machine),
        building(machine, "kernels", ["test_kernels"], "tests/test_kernels"),
        building_all(machine),
        building(machine, "python", PACKAGE, extension),
        building(machine, "llama", TRAINER, "benchmarks/benchmark_training"),
        building(machine, "rates", RATES, "benchmarks/benchmark_gpu"),
        building(machine, "runtime", RUNTIME, "tests/test_runtime"),
        building(machine, "engine", ENGINE, "tests/test_zero"),
    ]


def quick_kernels(machine: Machine) -> Step:
    command = (str(machine.build / "tests" / "test_kernels"), QUICK)
    return Step("kernels-quick", "kernels give the bits of the CPU: the short cases", 60, command, 12, after="build-kernels")


def tests(machine: Machine) -> list[Step]:
    """Return the steps of tests that have passed on the emulation, and of what looks at the kernels with tools."""
    engine = ctest(machine, "-E", "^(kernels|runtime|llama):")
    alone = ctest(machine, "-R", "^runtime:", processes=1)  # some look at how much of the GPU's memory is free
    doctor = ("env", f"PYTHONPATH={machine.build / 'python'}", *python("-m", "ballast", "doctor", "--drive", str(machine.work)))
    all_kernels, layers = ctest(machine, "-R", "^kernels:"), ctest(machine, "-R", "^llama:")
    return [
        Step("test-engine", "offload, NCCL, and training at each stage and tier", 120, engine, 35, after="build-engine"),
        testing_package(machine),
        *sanitizers(machine)[:1],
        Step("test-kernels", "kernels give the bits of the CPU", 240, all_kernels, 40, after="build-kernels"),
        Step("test-runtime", "memory, streams and events", 120, alone, 20, after="build-runtime"),
        Step("test-llama", "layers on the GPU vs. the CPU, and a small training", 120, layers, 20, after="build-llama"),
        Step("machine", "the machine as Ballast sees it", 60, doctor, 5, after="build-python", needs_gpu=False),
        *sanitizers(machine)[1:],
    ]


def testing_package(machine: Machine) -> Step:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "python").rglob("test_gpu*.py"))
    tests = python("-m", "pytest", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", "--durations=5", *files)
    about = "tests/python/**/test_gpu*.py; without a GPU those parts that run on the CPU"
    return Step("test-python", about, 200, tests, 60, after="build-python", needs_gpu=False, module="torch")


def sanitizers(machine: Machine) -> list[Step]:
    tool = machine.program("compute-sanitizer") or "compute-sanitizer"
    program = str(machine.build / "tests" / "test_kernels")

    def step(name: str, about: str) -> Step:
        command = (tool, "--tool", name, "--error-exitcode", "9", "--print-limit", "20", program, QUICK, "--durations", "yes")
        return Step(name, about, 120, command, 60, after="build-kernels", program="compute-sanitizer")

    return [
        step("memcheck", "kernel tests under compute-sanitizer: memory"),
        step("racecheck", "kernel tests under compute-sanitizer: shared memory"),
    ]


def trainer(machine: Machine) -> list[Step]:
    folders = ("--build", str(machine.build), "--work", str(machine.work / "llama"))

    def tier(name: str) -> Step:
        command, about = python("-m", "on_a_gpu.tiers", name, *folders), f"the Llama trainer with its state on the {name}"
        losses = losses_of(name, machine.work / "llama")
        # The others are compared with those of the device, where they are there.
        return Step(f"llama-{name}", about, 45, command, 6, after="build-llama", product=losses if name == "device" else None)

    compare = python("-m", "on_a_gpu.tiers", "compare", *folders)
    equal = Step("llama-losses", "all tiers give the same losses, bit by bit", 30, compare, 1, after="llama-device")
    return [tier("device"), tier("host"), tier("drive"), equal]


def rates(machine: Machine) -> list[Step]:
    few = ("--rounds", "5", "--warm-up", "1")

    def step(where: str, about: str, *choice: str) -> Step:
        program = machine.build / "benchmarks" / f"benchmark_{'gpu' if where == 'gpu' else 'kernels'}"
        measure = python("-m", "on_a_gpu.rates", where, str(program), *few, *choice)
        return Step(f"rates-{where}", about, 60, measure, 20, after="build-rates", needs_gpu=where == "gpu")

    return [
        step("gpu", "kernels vs. a copy in the GPU's memory; transfers vs. PCIe"),
        step("cpu", "AdamW on all cores vs. a copy in the host's memory", "--only", ", whole"),
    ]


def trainings(machine: Machine) -> list[Step]:
    """Return the steps that train. On emulated GPUs small models take their place, which tries all but the GPU."""
    trial = ("--device", "emulated", "--small") if machine.emulated else ()
    build = machine.emulated or machine.build

    def step(name: str) -> Step:
        case = CASES[name]
        folders = ("--build", str(build), "--work", str(machine.work / "trainings"))
        command, about = python("-m", "on_a_gpu.trainings", name, *folders, *trial), f"{case.model}: {case.about}"
        needs = {"needs_gpu": False} if machine.emulated else {"after": "build-python"}
        module = "torchao" if case.system == "torchao" else "torch"
        return Step(f"train-{name}", about, 2 * case.estimate_s + 20, command, case.estimate_s, module=module, **needs)

    return [step(name) for name in CASES]


def driver_messages() -> Step:
    """Return the step that asks the driver what went wrong, for what the steps before it do not explain."""
    ask = "dmesg 2>&1 | grep -iE 'nvrm|xid|segfault|out of memory|not permitted' | tail -n 30; nvidia-smi -q"
    return Step("driver", "messages of the driver and the kernel", 30, ("bash", "-c", ask), 3)
