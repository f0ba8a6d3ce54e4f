"""This machine, GPUs by name, the usual rates at which bytes move, and those that `ballast bench` has measured."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from ballast import _core
from ballast.checks import all_known, is_number, refuse
from ballast.json_reader import object_in
from ballast.sizes import Rate, parse_rate


class GpuFound(TypedDict):
    name: str
    pci: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class CgroupFound(TypedDict):
    limit_bytes: int
    available_bytes: int
    file: str


class MemoryFound(TypedDict):
    total_bytes: int
    available_bytes: int
    memlock_bytes: int | None
    address_space_bytes: int | None
    cgroup: CgroupFound | None


class MachineFound(TypedDict):
    cpu: str
    cores: int
    cores_of_host: int
    core_quota: float | None
    numa_nodes: int
    instruction_set: str
    memory: MemoryFound
    gpus: list[GpuFound]
    no_gpu_because: str
    no_nccl_because: str


def this_machine(*, root: str = "/") -> MachineFound:
    """Return the cores, the memory with its limits and the GPUs of this process, and whether NCCL can be used.

    `root` replaces the folder with /proc and /sys, for tests.

    >>> found = this_machine()
    >>> found["cores"] >= 1 and found["memory"]["total_bytes"] > 0
    True
    """
    return _core.this_machine(root=root)


def available_memory(machine: MachineFound) -> int:
    """Return the bytes of host memory that this process may still allocate."""
    memory, limits = machine["memory"], machine["memory"]["cgroup"]
    return memory["available_bytes"] if limits is None else min(memory["available_bytes"], limits["available_bytes"])


GIB = 1 << 30
ATTENTION_REACH = 0.5  # what fused attention reaches of what products do
CORE_PRODUCTS = 50e9  # operations a second in products of bf16 matrices on a core with AVX2, rounded down
# How often what lies between products passes over memory in forward (Description.moved): where it is fused, and where each
# operation of a model in torch is a kernel of its own.
FUSED_PASSES, EAGER_PASSES = 1.0, 4.0
# GeForce cards do not read each other's memory. Those of a machine pass so many of their links through that of the host.
THROUGH_HOST = 1.2
# The rates of a machine as one rank sees it, in bytes a second.
RATES = ("gather", "reduce", "across", "upload", "download", "shared", "device_memory", "host_memory", "read", "write")
SHARED_RATES = ("host_memory", "read", "write")  # those that the ranks of a machine share


class Host(NamedTuple):
    """A machine that has GPUs: the rate of its memory, 0.7 of that of its channels, and its cores."""

    memory: float
    cores: int


# Two channels of DDR5 in a desktop, sixteen in a server with two processors; two Grace processors for four GPUs, or one with
# 480 GB for one; LPDDR5X that a GPU shares.
DESKTOP, SERVER, DDR5_SERVER, GRACE = Host(60e9, 16), Host(200e9, 64), Host(400e9, 96), Host(700e9, 144)
ONE_GRACE, SPARK = Host(270e9, 72), Host(190e9, 20)
# Bytes a second of AdamW updates where arithmetic limits them: on a core with AVX-512 (`./run-benchmarks kernels`, from cache),
# and on a GPU, where updates in all other formats are as fast as the memory.
CORE_UPDATES = {"fp32": 65e9, "split": 54e9, "bf16": 32e9, "compact": 15e9, "4bit": 12e9}
GPU_UPDATES = {"compact": 1.9e12, "4bit": 1.6e12}


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: its memory, dense bf16 flops, and links in one direction.

    The memory is the total of cudaMemGetInfo, which torch reports, rounded down to 0.1 GiB. nvidia-smi shows 0.3 to 0.8 GiB
    more, which the driver keeps for itself.
    """

    memory: int
    flops: float
    memory_rate: float
    host_link: float
    peer_link: float  # NVLink, or the host's link
    has_bf16: bool = True  # otherwise the flops are those of fp16
    runs_ballast: bool = True
    host: Host = SERVER
    reach: float = 0.5  # the part of its flops that products of large matrices reach
    one_pool: bool = False  # it shares its memory with the host, of which it is the only GPU; `peer_link` is the network's

    @property
    def has_nvlink(self) -> bool:
        """Whether GPUs of a machine have links of their own, of NVLink or of AMD's kind."""
        return self.peer_link > self.host_link


NO_BF16 = "this GPU has no arithmetic in bf16: the time is that of dtype fp16"
IN_FP32 = "the time is that of products in bf16: in fp32, TF32 reaches half of that rate at most, and torch's default less"
NO_ROCM = "Ballast runs on NVIDIA GPUs and on CPUs: this plan is a forecast only"


def _gib(size: float) -> int:
    return int(size * GIB)


GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu(_gib(39.4), 312e12, 1.555e12, 25e9, 230e9, reach=0.78),
    "a100": Gpu(_gib(79.2), 312e12, 2.039e12, 25e9, 230e9, reach=0.78),
    "h100": Gpu(_gib(79.1), 989e12, 3.35e12, 50e9, 350e9, host=DDR5_SERVER, reach=0.63),
    "h200": Gpu(_gib(139.7), 989e12, 4.8e12, 50e9, 350e9, host=DDR5_SERVER, reach=0.63),
    "b200": Gpu(_gib(178.3), 2250e12, 8e12, 50e9, 700e9, host=DDR5_SERVER, reach=0.63),
    "gb200": Gpu(_gib(184.3), 2500e12, 8e12, 180e9, 700e9, host=GRACE, reach=0.63),  # two share a Grace
    "gh200": Gpu(_gib(94.5), 989e12, 4e12, 297e9, 350e9, host=ONE_GRACE, reach=0.63),  # of 96 GB
    "gb10": Gpu(_gib(121.6), 125e12, 0.273e12, 110e9, 25e9, host=SPARK, one_pool=True),  # DGX Spark
    "t4": Gpu(_gib(14.7), 65e12, 0.32e12, 12e9, 10e9, has_bf16=False),
    "l4": Gpu(_gib(22.0), 121e12, 0.3e12, 25e9, 20e9),
    "a10": Gpu(_gib(22.1), 125e12, 0.6e12, 25e9, 20e9),
    "l40s": Gpu(_gib(44.4), 362e12, 0.864e12, 25e9, 20e9, reach=0.57),
    "rtx3090": Gpu(_gib(23.6), 71e12, 0.936e12, 25e9, 10e9, host=DESKTOP, reach=0.9),
    "rtx4090": Gpu(_gib(23.5), 165e12, 1.008e12, 25e9, 10e9, host=DESKTOP, reach=0.97),
    "rtx5090": Gpu(_gib(31.3), 209e12, 1.792e12, 50e9, 20e9, host=DESKTOP, reach=0.97),
    "rtxpro6000": Gpu(_gib(94.9), 503e12, 1.792e12, 50e9, 40e9, host=DDR5_SERVER, reach=0.77),
    "mi300x": Gpu(_gib(191.9), 1307e12, 5.3e12, 50e9, 340e9, host=DDR5_SERVER, runs_ballast=False),
}

UNNAMED = "GPU"  # a GPU that the caller describes by its memory and flops
UNNAMED_GPU = Gpu(0, 0.0, 1e12, 25e9, 20e9)  # its links are those of PCIe 4


def notes_of(gpu: Gpu, formats: Container[_core.DType]) -> list[str]:
    notes = [NO_BF16] if _core.DType.bf16 in formats and not gpu.has_bf16 else []
    notes += [IN_FP32] if _core.DType.fp32 in formats else []
    return notes + ([] if gpu.runs_ballast else [NO_ROCM])


def gpu_called(name: str) -> str:
    """Return the name in the table for a name as people write it, or else the same name in lower case. A size of memory has to
    be that of the GPU, in GiB or in GB.

    >>> [gpu_called(name) for name in ("RTX 4090", "4090", "A100-80GB", "a100_sxm4_40gb", "NVIDIA H100 80GB HBM3", "h100-sxm")]
    ['rtx4090', 'rtx4090', 'a100', 'a100-40gb', 'h100', 'h100']
    >>> gpu_called("h100-pcie"), gpu_called("H100 NVL 94GB"), gpu_called("RTX 4080")
    ('h100-pcie', 'h100 nvl 94gb', 'rtx 4080')
    """
    given = name.strip().lower()
    folded = re.sub(r"[-_\s]", "", given)
    models = dict.fromkeys(word.partition("-")[0] for word in GPUS)
    model = rf"((?:rtx)?\d{{4}}|{'|'.join(models)})"
    found = re.fullmatch(rf"(?:nvidia|amd|instinct|geforce)*{model}(?:sxm\d?)?(?:(\d+)g(?:i?b)?)?(?:hbm\d?e?)?", folded)
    if found is None:
        return given
    name = f"rtx{found[1]}" if found[1].isdecimal() else found[1]
    if found[2] is None:
        return name if name in GPUS else given
    sized = [word for word in GPUS if word.partition("-")[0] == name and _has(GPUS[word], int(found[2]))]
    return sized[0] if sized else given


def _has(gpu: Gpu, size: int) -> bool:
    """Return whether a GPU is sold with this memory, of which CUDA sees a few hundredths less."""
    return any(abs(gpu.memory - size * unit) < 0.025 * gpu.memory for unit in (GIB, 10**9))


def gpu_like(name: str, memory: int) -> Gpu:
    """Return the GPU with the name that a driver reports, or else the one with the nearest memory.

    >>> gpu_like("NVIDIA A100-SXM4-40GB", 40 << 30) is GPUS["a100-40gb"]
    True
    >>> gpu_like("NVIDIA GB200", 185 << 30) is GPUS["gb200"], gpu_like("NVIDIA L40", 45 << 30) is GPUS["l40s"]
    (True, True)
    """
    return named_gpu(name, memory) or _nearest(GPUS.values(), memory)


def named_gpu(name: str, memory: int) -> Gpu | None:
    """Return the GPU with the name that a driver reports; None if the table does not have it.

    >>> named_gpu("NVIDIA H100 80GB HBM3", 80 << 30) is GPUS["h100"], named_gpu("Quadro P400", 2 << 30)
    (True, None)
    >>> named_gpu("NVIDIA GeForce RTX 4090", 24 << 30) is GPUS["rtx4090"]
    True
    """
    models = {word: word.partition("-")[0] for word in GPUS}
    spaced = {word: re.sub(r"(?<=[a-z])(?=\d)", r"\\s*", model) for word, model in models.items()}  # "RTX 4090"
    found = {word: models[word] for word, pattern in spaced.items() if re.search(rf"{pattern}(?!\d)", name.lower())}
    longest = max(map(len, found.values()), default=0)  # "b200" is in "gb200", too
    named = [GPUS[word] for word, model in found.items() if len(model) == longest]
    return _nearest(named, memory) if named else None


def _nearest(gpus: Iterable[Gpu], memory: int) -> Gpu:
    return min(gpus, key=lambda gpu: abs(gpu.memory - memory))


@dataclass(frozen=True)
class Rates:
    """Rates in bytes a second: of each GPU, and of the resources that the GPUs of a machine share."""

    peers: float  # what each GPU exchanges with others of its machine
    network: float = 0.4e9  # each GPU's part of the link to other machines: 25 Gbit/s for 8 of them
    upload: float = 25e9
    download: float = 25e9
    shared: float = 25e9  # uploads of parameters from host memory that the GPUs of a machine share
    device_memory: float = 1e12
    host_memory: float = SERVER.memory  # a machine's memory
    read: float = 12e9  # all drives of a machine together
    write: float = 6e9


def rates_of(gpu: Gpu, given: Mapping[str, Rate], *, ranks_of_machine: int = 1) -> Rates:
    """Return the usual rates of a GPU in a machine with so many, replaced by those that are given.

    >>> rates_of(GPUS["h100"], {"read": "3GB/s"}).read
    3000000000.0
    """
    # Machines with NVLink have 400 Gbit/s for each GPU. The network's card has a link as that of the GPU to the host, at most.
    network = min(45e9, 0.9 * gpu.host_link) if gpu.has_nvlink else 0.9 * gpu.peer_link if gpu.one_pool else Rates.network
    through_host = THROUGH_HOST * gpu.host_link / ranks_of_machine if gpu.peer_link < gpu.host_link / 2 else math.inf
    usual = Rates(
        peers=min(gpu.peer_link, through_host),
        network=network,
        upload=gpu.host_link,
        download=gpu.host_link,
        shared=gpu.host_link,
        device_memory=0.85 * gpu.memory_rate,
        host_memory=gpu.host.memory,
    )
    return replaced_rates(usual, given)


def replaced_rates(usual: Rates, given: Mapping[str, Rate]) -> Rates:
    all_known("rate", given, vars(usual))
    return replace(usual, **{name: parse_rate(rate) for name, rate in given.items()})


def rates_of_cpus(cores: int) -> Rates:
    """Return the rates of ranks on CPUs: those that `./run-benchmarks kernels` and `comm` find on servers, rounded
    down."""
    memory = min(25e9 * cores, Rates.host_memory)
    return Rates(peers=5e9, upload=10e9, download=10e9, device_memory=memory, host_memory=memory)


def machine(budget: Mapping[str, int], rates: Rates, *, ranks: int, ranks_of_machine: int) -> _core.Machine:
    """Return the machine as one rank sees it, which may use these bytes of each tier: with its part of the resources that the
    ranks of a machine share. Its copies from and to the host are no faster than its part of the host's memory."""
    made = _core.Machine()
    made.device_bytes, made.host_bytes, made.nvme_bytes = (budget[tier] for tier in ("device", "host", "nvme"))
    made.gather = made.reduce = rates.peers
    made.across = rates.network
    made.ranks_per_host = ranks_of_machine if ranks > ranks_of_machine else 0
    made.device_memory = rates.device_memory
    made.host_memory = rates.host_memory / ranks_of_machine
    links = (min(rate, made.host_memory) for rate in (rates.upload, rates.download, rates.shared))
    made.upload, made.download, made.shared = links
    made.read, made.write = rates.read / ranks_of_machine, rates.write / ranks_of_machine
    return made


# --- What `ballast bench` has measured ---

BENCH_VERSION = 1
CPU = "cpu"  # the device of ranks without a GPU
MOST_MEASURED = 1e21  # the largest figure
WRITER = "a file of ballast bench --output"
RATES_MEASURED = ("peers", "upload", "download", "device_memory", "host_memory", "read", "write")


@dataclass(frozen=True)
class Measured:
    """What a machine reached. Rates are in bytes a second; those of shared resources are of all ranks together."""

    device: str  # the name of the GPU, or "cpu"
    memory: int  # bytes of a rank's device
    flops: float  # what a rank reaches in forward and backward passes
    rates: Mapping[str, float]
    cores: int
    busy: bool  # other processes took part of the machine

    @property
    def on_cpu(self) -> bool:
        return self.device == CPU

    def notes(self) -> tuple[str, ...]:
        words = "rates were measured while other processes used the machine: an idle one is faster"
        return (words,) if self.busy else ()


def read_measured(given: str | os.PathLike[str]) -> Measured:
    """Return the figures of a file that `ballast bench` has written."""
    path = Path(given)
    if not path.is_file():
        refuse(f"cannot read {path}: it {'is no file' if path.exists() else 'does not exist'}", needed=WRITER)
    found = object_in(path, WRITER)
    if found.get("ballast_bench") != BENCH_VERSION:
        refuse(
            f"cannot read {path}: it has no figures of this version of ballast bench",
            needed=f"{WRITER}, version {BENCH_VERSION}",
        )
    measured = found.get("measured")
    rates = measured.get("rates") if isinstance(measured, dict) else None
    if not isinstance(measured, dict) or not isinstance(rates, dict):
        refuse(f"cannot read {path}: it has no rates", where="measured", needed=WRITER)
    memory, flops, cores = (_positive(measured.get(name), name, path) for name in ("memory", "flops", "cores"))
    known = {name: _positive(rate, name, path) for name, rate in rates.items() if name in RATES_MEASURED}
    return Measured(str(measured.get("device", CPU)), int(memory), flops, known, int(cores), bool(found.get("busy")))


def _positive(figure: Any, name: str, path: Path) -> float:
    if not is_number(figure) or not 0 < figure <= MOST_MEASURED:  # NaN is neither
        refuse(f"cannot read {path}: {name} is {figure!r}", where="measured", needed="a number above 0")
    return float(figure)
