"""GPUs by name, and the usual rates at which bytes move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ballast import _core
from ballast.checks import all_known
from ballast.sizes import Rate, parse_rate

MIB = 1 << 20
# The rates of a machine, in bytes a second.
RATES = ("gather", "reduce", "upload", "download", "device_memory", "host_memory", "read", "write")


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: memory as nvidia-smi shows it, dense bf16 flops, and links in one direction."""

    memory: int
    flops: float
    memory_rate: float
    host_link: float
    peer_link: float  # NVLink, or the host's link


GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu(40960 * MIB, 312e12, 1.555e12, 25e9, 230e9),
    "a100": Gpu(81920 * MIB, 312e12, 2.039e12, 25e9, 230e9),
    "h100": Gpu(81559 * MIB, 989e12, 3.35e12, 50e9, 350e9),
    "h200": Gpu(143771 * MIB, 989e12, 4.8e12, 50e9, 350e9),
    "l40s": Gpu(46068 * MIB, 362e12, 0.864e12, 25e9, 20e9),
    "rtx3090": Gpu(24576 * MIB, 71e12, 0.936e12, 25e9, 10e9),
    "rtx4090": Gpu(24564 * MIB, 165e12, 1.008e12, 25e9, 10e9),
}


def gpu_like(name: str, memory: int) -> Gpu:
    """Return the GPU with the name that a driver reports, or else the one with the nearest memory.

    >>> gpu_like("NVIDIA A100-SXM4-40GB", 40 << 30) is GPUS["a100-40gb"]
    True
    """
    return named_gpu(name, memory) or _nearest(GPUS.values(), memory)


def named_gpu(name: str, memory: int) -> Gpu | None:
    """Return the GPU with the name that a driver reports; None if the table does not have it.

    >>> named_gpu("NVIDIA H100 80GB HBM3", 80 << 30) is GPUS["h100"], named_gpu("Tesla T4", 16 << 30)
    (True, None)
    """
    plain = name.lower().replace(" ", "")
    named = [gpu for word, gpu in GPUS.items() if word.partition("-")[0] in plain]
    return _nearest(named, memory) if named else None


def _nearest(gpus: Iterable[Gpu], memory: int) -> Gpu:
    return min(gpus, key=lambda gpu: abs(gpu.memory - memory))


@dataclass(frozen=True)
class Rates:
    """Rates in bytes a second: of each GPU, and of the resources that the GPUs of a machine share."""

    peers: float  # between GPUs of a machine, for each GPU
    network: float = 45e9  # between machines, for each GPU: 400 Gbit/s
    upload: float = 25e9
    download: float = 25e9
    device_memory: float = 1e12
    host_memory: float = 200e9  # of a machine
    read: float = 12e9  # of all drives of a machine
    write: float = 6e9


def rates_of(gpu: Gpu, given: Mapping[str, Rate]) -> Rates:
    """Return the usual rates of a GPU, replaced by those that are given.

    >>> rates_of(GPUS["h100"], {"read": "3GB/s"}).read
    3000000000.0
    """
    usual = Rates(gpu.peer_link, upload=gpu.host_link, download=gpu.host_link, device_memory=0.85 * gpu.memory_rate)
    all_known("rate", given, vars(usual))
    return replace(usual, **{name: parse_rate(rate) for name, rate in given.items()})


def rates_of_cpus(cores: int) -> Rates:
    """Return the rates of ranks on CPUs: those that `./run-benchmarks kernels` and `comm` find on servers, rounded
    down."""
    memory = min(25e9 * cores, Rates.host_memory)
    return Rates(peers=5e9, upload=10e9, download=10e9, device_memory=memory, host_memory=memory)


@dataclass(frozen=True)
class Budget:
    """The bytes that one rank may use of each tier."""

    device: int
    host: int
    nvme: int


def machine(budget: Budget, rates: Rates, *, ranks: int, ranks_of_machine: int) -> _core.Machine:
    """Return the machine as one rank sees it: with its part of the resources that the ranks of a machine share."""
    made = _core.Machine()
    made.device_bytes, made.host_bytes, made.nvme_bytes = budget.device, budget.host, budget.nvme
    between = rates.peers if ranks <= ranks_of_machine else min(rates.peers, rates.network)
    made.gather = made.reduce = between
    made.upload, made.download = rates.upload, rates.download
    made.device_memory = rates.device_memory
    made.host_memory = rates.host_memory / ranks_of_machine
    made.read, made.write = rates.read / ranks_of_machine, rates.write / ranks_of_machine
    return made
