"""`ballast doctor`: find problems of this machine that slow down or prevent training, and name a remedy for each."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checks import refuse
from ballast.errors import Error
from ballast.planning.hardware import MachineFound
from ballast.sizes import human_size
from ballast.tools import Answer, add_command

SMALL_MEMLOCK = 1 << 30
SMALL_SHARED_MEMORY = 1 << 30  # NCCL and data loaders with workers use it; Ballast itself does not
PROBE = 64 << 20  # bytes that are written and read
LITTLE_SPACE = 64 << 30
SLOW = 1e9  # bytes a second
EXAMPLES = "doctor\ndoctor --drive . --json\ndoctor --issue"
MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True)
class Diagnostic:
    """One result. Its state is "good", "note" (slower, or smaller than it could be) or "bad" (a training would fail)."""

    about: str
    found: str
    remedy: str = ""
    given: str = ""  # the state, where it is not "note" with a remedy and "good" without one

    @property
    def state(self) -> str:
        return self.given or ("note" if self.remedy else "good")


def bad(about: str, found: str, remedy: str) -> Diagnostic:
    return Diagnostic(about, found, remedy, "bad")


@dataclass(frozen=True)
class Machine:
    """The facts to examine: the findings of the C++ library, and files of the system."""

    found: MachineFound
    root: Path

    def text(self, file: str) -> str:
        """Return the text of a system file, or nothing where there is none."""
        try:
            return (self.root / file).read_text().strip()
        except OSError:
            return ""


def examine(*, drives: Sequence[str] = (".",), root: str = "/") -> list[Diagnostic]:
    """Examine the machine and the drives. `root` replaces the folder with /proc and /sys, for tests.

    >>> [diagnostic.about for diagnostic in examine(drives=[])][:2]
    ['gpu', 'cpu']
    """
    machine = Machine(_core.this_machine(root=root), Path(root))
    looks = (other_project, gpus, cores, numa, memory, memlock, shared_memory, io_uring)
    diagnostics = [diagnostic for look in looks for diagnostic in look(machine)]
    return diagnostics + [diagnostic for folder in drives for diagnostic in look_at(folder)]


def other_project(machine: Machine) -> Iterator[Diagnostic]:
    """Look for the project that is named `ballast` on PyPI, whose module has the name of this one."""
    try:
        found = f"ballast {version('ballast')} is installed too: the files of its module and of this one replace each other"
        yield bad("package", found, "pip uninstall ballast ballast-train, and then install this one (ballast-train) again.")
    except PackageNotFoundError:
        return


def gpus(machine: Machine) -> Iterator[Diagnostic]:
    driver = machine.text("proc/driver/nvidia/version").partition("\n")[0]
    if not machine.found["gpus"]:
        why = machine.found["no_gpu_because"]
        if driver:
            remedy = "Check nvidia-smi and CUDA_VISIBLE_DEVICES. Start a container with --gpus all."
            remedy = "Put nvcc on the PATH, and install Ballast again." if "build" in why else remedy
            yield bad("gpu", f"a driver is installed, but no GPU can be used: {why}", remedy)
        else:
            remedy = "Planning needs no GPU. Training works on CPUs, slowly. A GPU needs NVIDIA's driver."
            yield Diagnostic("gpu", f"none: {why}", remedy)
        return
    yield Diagnostic("driver", driver or "present")
    for gpu in machine.found["gpus"]:
        yield Diagnostic("gpu", f"{gpu['name']}, {human_size(gpu['memory_bytes'])}, at {gpu['pci']}")
        yield from link(machine, gpu["pci"])
    why, wheels = machine.found["no_nccl_because"], find_spec("nvidia")  # torch loads the NCCL of a wheel when it is imported
    folders = wheels.submodule_search_locations or () if wheels else ()
    if "built" in why:
        remedy = "Install NCCL (libnccl-dev, or nvidia-nccl-cu13 from PyPI), and then Ballast again."
        yield bad("nccl", "this build has no NCCL: it trains on one GPU only", remedy)
    elif why and not any(Path(folder, "nccl/lib/libnccl.so.2").exists() for folder in folders):
        yield bad("nccl", f"cannot be loaded: {why}", "Install libnccl2, or nvidia-nccl-cu13 from PyPI.")


def link(machine: Machine, pci: str) -> Iterator[Diagnostic]:
    """Examine the width of a GPU's PCIe link. Its current speed says nothing: an idle link is slow."""
    folder = f"sys/bus/pci/devices/{pci.lower()}"
    width, most = machine.text(f"{folder}/current_link_width"), machine.text(f"{folder}/max_link_width")
    speed = machine.text(f"{folder}/max_link_speed")
    if not width or not most:
        return
    if width != most:
        remedy = "Move the card to a slot with all lanes, or check risers and BIOS: uploads and downloads are slower."
        yield Diagnostic("pcie", f"{pci} has {width} of {most} lanes", remedy)
    else:
        yield Diagnostic("pcie", f"{pci} has {width} lanes of {speed or 'unknown speed'}")


def cores(machine: Machine) -> Iterator[Diagnostic]:
    found = machine.found
    text = f"{found['cpu']}, {found['cores']} of {found['cores_of_host']} cores, {found['instruction_set']}"
    quota = found["core_quota"]
    if quota is not None and quota < found["cores_of_host"]:
        yield Diagnostic("cpu", f"{text}; a quota of {quota:.4g}", "Raise the container's CPU limit if updates run on the CPU.")
    else:
        yield Diagnostic("cpu", text)


def numa(machine: Machine) -> Iterator[Diagnostic]:
    nodes = machine.found["numa_nodes"]
    if nodes == 1:
        yield Diagnostic("numa", "one memory node")
        return
    at = [machine.text(f"sys/bus/pci/devices/{gpu['pci'].lower()}/numa_node") for gpu in machine.found["gpus"]]
    gpus = f"; GPUs at {', '.join(at)}" if any(at) else ""
    remedy = "Bind each rank to the node of its GPU: numactl --cpunodebind=N --membind=N, or your launcher's binding."
    yield Diagnostic("numa", f"{nodes} memory nodes{gpus}", remedy)


def memory(machine: Machine) -> Iterator[Diagnostic]:
    limits = machine.found["memory"]
    yield Diagnostic("memory", f"{human_size(limits['available_bytes'])} of {human_size(limits['total_bytes'])} available")
    cgroup = limits["cgroup"]
    if cgroup is None:
        return
    text = f"{human_size(cgroup['available_bytes'])} of {human_size(cgroup['limit_bytes'])} left ({cgroup['file']})"
    remedy = "Ballast stays below this limit. Raise it with docker --memory, resources.limits.memory or sbatch --mem."
    yield Diagnostic("container", text, remedy if cgroup["limit_bytes"] < limits["total_bytes"] else "")


def memlock(machine: Machine) -> Iterator[Diagnostic]:
    limit = machine.found["memory"]["memlock_bytes"]
    remedy = "Raise the limit (ulimit -l unlimited, docker --ulimit memlock=-1): transfers need pinned memory to be fast."
    is_small = limit is not None and limit < SMALL_MEMLOCK
    yield Diagnostic("memlock", "no limit" if limit is None else human_size(limit), remedy if is_small else "")


def shared_memory(machine: Machine) -> Iterator[Diagnostic]:
    try:
        space = os.statvfs(machine.root / "dev/shm")
    except OSError:
        yield Diagnostic("shm", "there is no /dev/shm", "NCCL and data loaders use it. Ballast itself does not.")
        return
    size = space.f_frsize * space.f_blocks
    remedy = "NCCL and data loaders use it. Enlarge it with docker --shm-size=8g, or an emptyDir with medium: Memory."
    yield Diagnostic("shm", human_size(size), remedy if size < SMALL_SHARED_MEMORY else "")


def io_uring(machine: Machine) -> Iterator[Diagnostic]:
    """Examine whether io_uring works. Ballast reads and writes drives through it."""
    try:
        _core.require_io_uring()
    except Error as error:
        yield Diagnostic("io_uring", error.what_happened, error.remedy, "note")
    else:
        yield Diagnostic("io_uring", "works")


# --- Drives ---


def look_at(folder: str) -> Iterator[Diagnostic]:
    """Measure a directory, which takes about a second."""
    try:
        drive = _core.inspect_drive(folder, bytes=PROBE)
    except Error as error:
        yield bad("drive", f"{folder}: {error.what_happened}", error.remedy)
        return
    yield from judge(folder, drive)


def judge(folder: str, drive: _core.DriveReport) -> Iterator[Diagnostic]:
    system, free = drive.file_system, drive.free_bytes
    if drive.is_network:
        yield bad("drive", f"{folder} is on a network file system ({system})", "Use a directory on a local drive.")
    elif system == "tmpfs":
        yield bad("drive", f"{folder} is in memory ({system})", "Use a directory on a drive.")
    else:
        yield Diagnostic("drive", f"{folder} is on {system}")
    remedy = "Optimizer state takes 24 bytes per parameter on a drive (format split). Free space, or use another drive."
    yield Diagnostic("space", f"{human_size(free)} free", remedy if free < LITTLE_SPACE else "")
    if drive.buffered_because:
        remedy = "Use ext4 or xfs on the drive itself, not an overlay: the page cache costs memory and time."
        yield Diagnostic("direct", f"no direct I/O: {drive.buffered_because}", remedy)
    else:
        yield Diagnostic("direct", "direct I/O works")
    speed = f"read {drive.read / 1e9:.2f}, write {drive.write / 1e9:.2f}, both {drive.both / 1e9:.2f} GB/s"
    remedy = "Local NVMe drives are faster. Plan with these rates first: ballast plan --rate read=1GB/s."
    yield Diagnostic("speed", speed, remedy if drive.both < SLOW else "")


# --- The report of a bug ---

PACKAGES = ("torch", "accelerate", "deepspeed", "lightning", "numpy", "peft", "pytorch-lightning", "ray", "transformers", "trl")
# The variables that decide how Ballast, torch.distributed and their libraries run. No others are shown.
PREFIXES = ("BALLAST_", "GLOO_", "MALLOC_", "NCCL_", "OMP_", "TORCH_", "TORCHELASTIC_", "UCX_")
NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
# Addresses and names of machines, which a company may not want to publish.
PLACE = re.compile(r"ADDR|HOST|ENDPOINT|URL|PROXY|_LIST$", re.IGNORECASE)
PLACE_OR_LOGIN = re.compile(r"://|@|\d+(\.\d+){3}")
LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}


def bug_report(findings: Sequence[str], *, environment: Mapping[str, str] = os.environ) -> str:
    """Return the report. `findings` are the lines of `ballast doctor`."""
    home = environment.get("HOME", "")
    shown = [
        f"{name}={_shown(name, environment[name])}"
        for name in sorted(environment)
        if name in NAMES or name.startswith(PREFIXES)
    ]
    parts = [
        "### Versions",
        _block(f"{name:<20}{each}" for name, each in _versions()),
        "### Machine",
        _block(_without_home(line, home) for line in findings),
        "### Environment",
        _block(_without_home(line, home) for line in shown or ["(none of the variables is set)"]),
    ]
    return "\n\n".join(parts)


def _versions() -> Iterator[tuple[str, str]]:
    found = _core.this_machine(root="/")
    backend = "without CUDA" if "build" in found["no_gpu_because"] else "with CUDA"
    yield "ballast", f"{_core.version}, built {backend}, {'without NCCL' if found['no_nccl_because'] else 'NCCL is there'}"
    yield "python", f"{platform.python_version()}, {platform.python_implementation()}"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    try:
        yield "distribution", platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        yield "distribution", "unknown"
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _shown(name: str, value: str) -> str:
    """Return a value, unless its name or the value itself tells that it may not be published."""
    hides = SECRET.search(name) or PLACE.search(name) or PLACE_OR_LOGIN.search(value)
    return "(hidden)" if hides and value not in LOOPBACK else value


def _without_home(line: str, home: str) -> str:
    """Replace the home directory, whose name is that of the user."""
    return line.replace(home, "~") if len(Path(home).parts) > 1 else line


def _block(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


# --- The command ---


def add_to(commands: Any) -> None:
    about = "Examine this machine, and name what to change. Exits with 1 if a problem would stop a training."
    parser = add_command(commands, doctor, "examine this machine", about, EXAMPLES)
    help = "measure this folder as a place for state; takes some seconds; may be repeated"
    parser.add_argument("--drive", action="append", metavar="FOLDER", help=help)
    help = "print what a report of a bug needs, as Markdown: versions, the machine, variables of the launch; no secrets"
    parser.add_argument("--issue", action="store_true", help=help)


def doctor(chosen: argparse.Namespace) -> Answer:
    if chosen.issue and chosen.json:
        refuse("cannot print JSON and the report of a bug", needed="--json or --issue")
    diagnostics = examine(drives=chosen.drive or ["."])
    lines = "\n".join(_line(diagnostic) for diagnostic in diagnostics)
    names = ("state", "about", "found", "remedy")
    content = [{name: getattr(diagnostic, name) for name in names} for diagnostic in diagnostics]
    is_bad = any(diagnostic.state == "bad" for diagnostic in diagnostics)
    return Answer(bug_report(lines.splitlines()) if chosen.issue else lines, content, code=int(is_bad))


def _line(diagnostic: Diagnostic) -> str:
    line = f"{MARKS[diagnostic.state]}  {diagnostic.about:<10}{diagnostic.found}"
    return line + (f"\n{'':16}{diagnostic.remedy}" if diagnostic.remedy else "")
