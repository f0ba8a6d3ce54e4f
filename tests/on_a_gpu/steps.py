"""The steps of `run`, in their order: what tells the most comes first. The kernels are built and tested alone. Of all other
programs, rates and trainings, which only a GPU can tell, come before the tests that have passed on an emulated GPU."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from on_a_gpu.machine import ROOT, Machine
from on_a_gpu.tiers import losses_of

FORECASTS = {
    "plain": "a billion parameters in plain torch, to compare with and to learn the efficiency of the model's own work",
    "stage-3": "a billion at stage 3, which is the program of all stages on one GPU",
    "stage-3-host": "a billion at stage 3 with the optimizer's state on the host",
    "7b-compact": "seven billion on one GPU, compact state and gradients in bf16",
    "7b-host": "seven billion with fp32 state on the host, gradients in bf16",
}

RUNTIME = ["test_runtime"]
ENGINE = ["test_offload", "test_comm", "test_zero"]
PACKAGE = ["_core"]
TRAINER = ["llama", "benchmark_training", "test_llama"]
RATES = ["benchmark_gpu"]

QUICK = "[gpu]~*many elements*~*more elements*~*orthogonalizes*"  # tests of kernels that compute-sanitizer runs in seconds


@dataclass(frozen=True)
class Step:
    """A command with a limit, and what it needs. `product` is a file without which the step does not count as finished."""

    name: str
    about: str
    limit_s: int
    command: tuple[str, ...]
    after: str = ""  # the step that must have passed
    needs_gpu: bool = True
    program: str = ""  # a program that must be there
    module: str = ""  # a module of Python that must be there
    product: Path | None = None


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def all_steps(machine: Machine) -> list[Step]:
    return [
        Step("facts", "what the machine has", 120, python("-m", "on_a_gpu.facts"), needs_gpu=False),
        configuring(machine),
        *kernels(machine),
        building_all(machine),
        *package(machine),
        *rates(machine),
        *forecasts(machine),
        *trainer(machine),
        *runtime(machine),
        *engine(machine),
        testing_package(machine),
        *sanitizers(machine),
        driver_messages(),
    ]


def configuring(machine: Machine) -> Step:
    command = ("cmake", "-S", str(ROOT), "-B", str(machine.build), "-G", "Ninja", *machine.cmake_options())
    product = machine.build / "build.ninja"
    return Step("configure", "CMake, for the architectures of --architectures", 120, command, needs_gpu=False, product=product)


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


def kernels(machine: Machine) -> list[Step]:
    tests = ctest(machine, "-R", "^kernels:")
    return [
        building(machine, "kernels", ["test_kernels"], "tests/test_kernels"),
        Step("test-kernels", "kernels give the bits of the CPU", 240, tests, after="build-kernels"),
    ]


def runtime(machine: Machine) -> list[Step]:
    tests = ctest(machine, "-R", "^runtime:", processes=1)  # some look at how much of the GPU's memory is free
    return [
        building(machine, "runtime", RUNTIME, "tests/test_runtime"),
        Step("test-runtime", "memory, streams and events", 120, tests, after="build-runtime"),
    ]


def engine(machine: Machine) -> list[Step]:
    rest = ctest(machine, "-E", "^(kernels|runtime|llama):")
    return [
        building(machine, "engine", ENGINE, "tests/test_zero"),
        Step("test-engine", "offload, NCCL, and training at each stage and tier", 240, rest, after="build-engine"),
    ]


def package(machine: Machine) -> list[Step]:
    doctor = ("env", f"PYTHONPATH={machine.build / 'python'}", *python("-m", "ballast", "doctor", "--drive", str(machine.work)))
    return [
        building(machine, "python", PACKAGE, f"python/ballast/_core{sysconfig.get_config_var('EXT_SUFFIX')}"),
        Step("machine", "the machine as Ballast sees it", 60, doctor, after="build-python", needs_gpu=False),
    ]


def testing_package(machine: Machine) -> Step:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "python").rglob("test_gpu*.py"))
    tests = python("-m", "pytest", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", "--durations=5", *files)
    about = "tests/python/**/test_gpu*.py; without a GPU those parts that run on the CPU"
    return Step("test-python", about, 400, tests, after="build-python", needs_gpu=False, module="torch")


def sanitizers(machine: Machine) -> list[Step]:
    tool = machine.program("compute-sanitizer") or "compute-sanitizer"
    program = str(machine.build / "tests" / "test_kernels")

    def step(name: str, about: str) -> Step:
        command = (tool, "--tool", name, "--error-exitcode", "9", "--print-limit", "20", program, QUICK, "--durations", "yes")
        return Step(name, about, 120, command, after="build-kernels", program="compute-sanitizer")

    return [  # these come last: they take long
        step("memcheck", "kernel tests under compute-sanitizer: memory"),
        step("racecheck", "kernel tests under compute-sanitizer: shared memory"),
    ]


def trainer(machine: Machine) -> list[Step]:
    tests = ctest(machine, "-R", "^llama:")

    folders = ("--build", str(machine.build), "--work", str(machine.work / "llama"))

    def tier(name: str) -> Step:
        command, about = python("-m", "on_a_gpu.tiers", name, *folders), f"the Llama trainer with its state on the {name}"
        losses = losses_of(name, machine.work / "llama")
        # The others are compared with those of the device, where they are there.
        return Step(f"llama-{name}", about, 180, command, after="build-llama", product=losses if name == "device" else None)

    compare = python("-m", "on_a_gpu.tiers", "compare", *folders)
    return [
        building(machine, "llama", TRAINER, "benchmarks/benchmark_training"),
        tier("device"),
        tier("host"),
        tier("drive"),
        Step("llama-losses", "all tiers give the same losses, bit by bit", 30, compare, after="llama-device"),
        Step("test-llama", "layers on the GPU vs. the CPU, and a small training", 180, tests, after="build-llama"),
    ]


def rates(machine: Machine) -> list[Step]:
    measure = python("-m", "on_a_gpu.rates", str(machine.build / "benchmarks" / "benchmark_gpu"))
    return [
        building(machine, "rates", RATES, "benchmarks/benchmark_gpu"),
        Step("rates", "kernels vs. a copy in the GPU's memory; transfers vs. PCIe", 240, measure, after="build-rates"),
    ]


def forecasts(machine: Machine) -> list[Step]:
    def step(case: str, about: str) -> Step:
        folders = ("--build", str(machine.build), "--work", str(machine.work / "forecast"))
        command = python("-m", "on_a_gpu.forecast", case, *folders)
        name, about = f"forecast-{case}", f"measured and forecast steps: {about}"
        return Step(name, about, 150, command, after="build-python", module="torch")

    return [step(case, about) for case, about in FORECASTS.items()]


def driver_messages() -> Step:
    """Return the step that asks the driver what went wrong, for what the steps before it do not explain."""
    ask = "dmesg 2>&1 | grep -iE 'nvrm|xid|segfault|out of memory|not permitted' | tail -n 30; nvidia-smi -q"
    return Step("driver", "messages of the driver and the kernel", 30, ("bash", "-c", ask))
