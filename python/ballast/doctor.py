"""Find problems of this machine that slow down or prevent training, and name a remedy for each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ballast import _core
from ballast.diagnostic import Diagnostic, bad, good, note
from ballast.drives import look_at
from ballast.errors import Error
from ballast.sizes import human_size

if TYPE_CHECKING:
    from ballast._core import MachineFound

SMALL_MEMLOCK = 1 << 30
SMALL_SHARED_MEMORY = 1 << 30  # NCCL and data loaders with workers use it; Ballast itself does not


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
    looks = (gpus, cores, numa, memory, memlock, shared_memory, io_uring)
    diagnostics = [diagnostic for look in looks for diagnostic in look(machine)]
    return diagnostics + [diagnostic for folder in drives for diagnostic in look_at(folder)]


def gpus(machine: Machine) -> Iterator[Diagnostic]:
    """Examine the driver, the GPUs and their links."""
    driver = machine.text("proc/driver/nvidia/version").partition("\n")[0]
    if not machine.found["gpus"]:
        why = machine.found["no_gpu_because"]
        if driver:
            yield bad("gpu", f"a driver is installed, but no GPU can be used: {why}", _remedy_for_gpu(why))
        else:
            yield note(
                "gpu",
                f"none: {why}",
                "Planning needs no GPU. Training works on CPUs, slowly. A GPU needs NVIDIA's driver.",
            )
        return
    yield good("driver", driver or "present")
    for gpu in machine.found["gpus"]:
        yield good("gpu", f"{gpu['name']}, {human_size(gpu['memory_bytes'])}, at {gpu['pci']}")
        yield from link(machine, gpu["pci"])
    why = machine.found["no_nccl_because"]
    if "built" in why:
        remedy = "Install NCCL (libnccl-dev, or nvidia-nccl-cu13 from PyPI), and then Ballast again."
        yield bad("nccl", "this build has no NCCL: it trains on one GPU only", remedy)
    elif why and not _torch_brings_nccl():
        yield bad("nccl", f"cannot be loaded: {why}", "Install libnccl2, or nvidia-nccl-cu13 from PyPI.")


def _torch_brings_nccl() -> bool:
    """Return whether a wheel has NCCL, which torch loads when it is imported."""
    found = find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    return any(Path(folder, "nccl/lib/libnccl.so.2").exists() for folder in folders or ())


def _remedy_for_gpu(why: str) -> str:
    if "build" in why:
        return "Put nvcc on the PATH, and install Ballast again."
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES. Start a container with --gpus all."


def link(machine: Machine, pci: str) -> Iterator[Diagnostic]:
    """Examine the width of a GPU's PCIe link. Its current speed says nothing: an idle link is slow."""
    folder = f"sys/bus/pci/devices/{pci.lower()}"
    width, most = machine.text(f"{folder}/current_link_width"), machine.text(f"{folder}/max_link_width")
    speed = machine.text(f"{folder}/max_link_speed")
    if not width or not most:
        return
    if width != most:
        remedy = "Move the card to a slot with all lanes, or check risers and BIOS: uploads and downloads are slower."
        yield note("pcie", f"{pci} has {width} of {most} lanes", remedy)
    else:
        yield good("pcie", f"{pci} has {width} lanes of {speed or 'unknown speed'}")


def cores(machine: Machine) -> Iterator[Diagnostic]:
    """Examine the cores, which the optimizer's step on the CPU uses."""
    found = machine.found
    text = f"{found['cpu']}, {found['cores']} of {found['cores_of_host']} cores, {found['instruction_set']}"
    quota = found["core_quota"]
    if quota is not None and quota < found["cores_of_host"]:
        yield note("cpu", f"{text}; a quota of {quota:.4g}", "Raise the container's CPU limit if updates run on the CPU.")
    else:
        yield good("cpu", text)


def numa(machine: Machine) -> Iterator[Diagnostic]:
    """Examine the memory nodes, and those of the GPUs."""
    nodes = machine.found["numa_nodes"]
    if nodes == 1:
        yield good("numa", "one memory node")
        return
    at = [machine.text(f"sys/bus/pci/devices/{gpu['pci'].lower()}/numa_node") for gpu in machine.found["gpus"]]
    gpus = f"; GPUs at {', '.join(at)}" if any(at) else ""
    remedy = "Bind each rank to the node of its GPU: numactl --cpunodebind=N --membind=N, or your launcher's binding."
    yield note("numa", f"{nodes} memory nodes{gpus}", remedy)


def memory(machine: Machine) -> Iterator[Diagnostic]:
    """Examine the memory that this process may use, and what limits it."""
    limits = machine.found["memory"]
    yield good("memory", f"{human_size(limits['available_bytes'])} of {human_size(limits['total_bytes'])} available")
    cgroup = limits["cgroup"]
    if cgroup is None:
        return
    text = f"{human_size(cgroup['available_bytes'])} of {human_size(cgroup['limit_bytes'])} left ({cgroup['file']})"
    if cgroup["limit_bytes"] < limits["total_bytes"]:
        remedy = "Ballast stays below this limit. Raise it with docker --memory, resources.limits.memory or sbatch --mem."
        yield note("container", text, remedy)
    else:
        yield good("container", text)


def memlock(machine: Machine) -> Iterator[Diagnostic]:
    """Examine how much memory may be pinned."""
    limit = machine.found["memory"]["memlock_bytes"]
    if limit is None or limit >= SMALL_MEMLOCK:
        yield good("memlock", "no limit" if limit is None else human_size(limit))
    else:
        remedy = "Raise the limit (ulimit -l unlimited, docker --ulimit memlock=-1): transfers need pinned memory to be fast."
        yield note("memlock", human_size(limit), remedy)


def shared_memory(machine: Machine) -> Iterator[Diagnostic]:
    """Examine the size of /dev/shm."""
    try:
        space = os.statvfs(machine.root / "dev/shm")
    except OSError:
        yield note("shm", "there is no /dev/shm", "NCCL and data loaders use it. Ballast itself does not.")
        return
    size = space.f_frsize * space.f_blocks
    if size < SMALL_SHARED_MEMORY:
        remedy = "NCCL and data loaders use it. Enlarge it with docker --shm-size=8g, or an emptyDir with medium: Memory."
        yield note("shm", human_size(size), remedy)
    else:
        yield good("shm", human_size(size))


def io_uring(machine: Machine) -> Iterator[Diagnostic]:
    """Examine whether io_uring works. Ballast reads and writes drives through it."""
    try:
        _core.require_io_uring()
    except Error as error:
        yield note("io_uring", error.what_happened, error.remedy)
    else:
        yield good("io_uring", "works")
