"""The options of `plan()`, and how their values are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ballast import _core
from ballast.checks import all_known, is_number, one_of, read_count, refuse, refuse_value, texts_by_name
from ballast.formats import StateFormats, Wire
from ballast.models.adapters import BASE_FORMATS
from ballast.models.description import TREATMENTS
from ballast.outer.options import hosts_of
from ballast.planning.hardware import (
    EAGER_PASSES,
    FUSED_PASSES,
    GPUS,
    UNNAMED,
    UNNAMED_GPU,
    Gpu,
    Measured,
    Rates,
    gpu_called,
    gpu_like,
    rates_of,
    rates_of_cpus,
    read_measured,
    replaced_rates,
)
from ballast.schema import Option, options_of
from ballast.sizes import Count, Rate, Size, parse_count, parse_size
from ballast.step_options import Replicas, ScheduleOptions, Stage, StepOptions, copies_on, read_replicas
from ballast.tiers import AWAY, KINDS, TIERS, Offload, fractions_of

USUAL_GPU = "a100"
RESERVE = 2 << 30  # bytes of a GPU
HEADROOM = 0.05  # the part of a GPU's and of the host's memory
# NCCL's buffers take, according to its sources, about 3 GiB more on a machine of 8 GPUs with NVLink: a GPU has some for each of
# the others. Fewer of them count in proportion, and more count as 7.
RESERVE_OF_PEERS, COUNTED_PEERS = 3 << 30, 7
# The host's memory: the kernel describes each page of 4 KiB in 64 bytes. The system takes memory, and so do Python, torch and
# CUDA in each rank: an eighth of the host's memory at most, but the pages and 2 GiB at least.
PAGES = 64
RESERVE_OF_MACHINE, RESERVE_OF_RANK, LEAST_OF_MACHINE = 4 << 30, 2 << 30, 2 << 30
# A rank on CPUs: Python, torch, its optimizers and Gloo take 330 MiB, and freed memory that torch uses again the rest.
# tests/python/wrap/test_resident_memory.py measures it.
RESERVE_ON_CPU = 384 << 20
OFFLOADS = ("auto", "none", "host", "nvme")

# The most of each count: a plan lists all ranks, and the program of a step has an entry for each micro-step.
MOST = {
    "ranks": 1 << 20,
    "gpus_per_machine": 1 << 20,
    "tokens": 1 << 30,
    "sequence": 1 << 30,
    "micro_steps": 1 << 12,
    "lora": 1 << 16,
}


class TreatedActivations(NamedTuple):
    amount: int | str  # bytes, or one of TREATMENTS
    tier: str  # the tier of activations until backward


def _count(name: str, *, most: str = "") -> Callable[[int], int]:
    """Return a function that reads a whole number from 1 to the most of its name, or of another one."""
    return lambda given: read_count(name, given, most=MOST[most or name])


def _amount(name: str, read: Callable[[Any], int], *, such_as: str, least: int = 1 << 16) -> Callable[[Any], int]:
    """Return a function that reads an amount, and refuses one that lacks its unit: 24 where 24 GiB are meant."""

    def read_amount(given: Any) -> int:
        if 0 < (amount := read(given)) < least:
            needed = f'a number with a unit, such as "{such_as}", or at least {least:,}'
            refuse(f"cannot use {name}={given}: it is too little", needed=needed)
        return amount

    return read_amount


def _copies(given: Replicas | None, options: Options) -> int:
    ranks = range(options.ranks // hosts_of(options.outer, options.ranks, options.gpus_per_machine))
    return copies_on([rank // options.gpus_per_machine for rank in ranks], read_replicas(given))


@dataclass(kw_only=True, unsafe_hash=True)
class MachineOptions:
    """The machine of a plan, and the work that it does."""

    ranks: Option[int, int] = Option(1, "the number of GPUs in all", _count("ranks"))
    gpus_per_machine: Option[int, int] = Option(
        8, "GPUs of one machine, which share its host memory and drives", _count("gpus_per_machine")
    )
    measured: Option[str | os.PathLike[str] | None, Measured | None] = Option(
        None,
        "a file of `ballast bench --output`: its rates, flops and memory replace the usual ones",
        read_measured,
        metavar="FILE.json",
    )
    gpu: Option[str | None, str | None] = Option(
        None,
        f'the name of a GPU, such as "h100"; by default "{USUAL_GPU}", the measured one, or `gpu_memory` and `flops`',
        read_with=lambda given, of: read_gpu(given, of.measured),
    )
    gpu_memory: Option[Size | None, int | None] = Option(
        None, "replaces the memory of that GPU", _amount("gpu_memory", parse_size, such_as="24GiB")
    )
    flops: Option[Count | None, int | None] = Option(
        None, 'replaces its peak in bf16, such as "990T"', _amount("flops", parse_count, such_as="990T", least=10**6)
    )
    host_memory: Option[Size | None, int | None] = Option(
        None,
        "of a machine; of it a 64th, 4 GiB, and 2 GiB for each rank are left to the system and torch, about an eighth at most. "
        "Without it nothing is kept on the host. It replaces the memory of measured CPUs",
        _amount("host_memory", parse_size, such_as="128GiB"),
    )
    drive_space: Option[Size | None, int | None] = Option(
        None,
        "free space on the drives of a machine; without it nothing is kept there",
        _amount("drive_space", parse_size, such_as="2TB"),
    )
    rates: Option[Mapping[str, Rate] | None, Mapping[str, Rate]] = Option(
        None,
        'replaces measured or usual rates by name, such as {"read": "3GB/s"}',
        read_with=lambda given, of: read_rates(given, of.measured),
    )
    reserve: Option[Size | None, int | None] = Option(
        None,
        "memory of each GPU for CUDA, NCCL and the allocator's gaps. None: 2 GiB, and more where NVLink joins the ranks of a "
        "machine: 5 GiB for 8 of them. On measured CPUs it is 384 MiB, for Python and torch",
        parse_size,
    )
    headroom: Option[float | str, float] = Option(
        HEADROOM,
        "the fraction of the memory of each GPU, and of the host, that is left free: activations are estimated",
        lambda given: read_headroom(given),
        metavar="FRACTION",
    )
    activations: Option[Size | None, TreatedActivations] = Option(
        None,
        '"checkpointed" (None), "selective" (products are kept), "kept", or a size. With ",host" or ",nvme" they leave the '
        'device until backward, as with `wrap(activations=)`; "host" alone means "kept,host"',
        read_with=lambda given, _: read_activations(given),
        metavar="HOW",
    )
    loss_chunk: Option[int | None, int | None] = Option(
        None,
        "tokens whose logits are there at once, as with `ballast.chunked_loss(chunk=)`; None: all",
        _count("loss_chunk", most="tokens"),
    )
    tokens: Option[int, int] = Option(8192, "tokens of one rank in one micro-step", _count("tokens"))
    sequence: Option[int | None, int | None] = Option(
        None,
        "tokens that attend to each other; at most `tokens`. None: 4096, or the most that the model takes",
        _count("sequence"),
    )
    expert_parallel: Option[int, int] = Option(
        1, "ranks that divide the experts of each layer, and exchange tokens for them", _count("expert_parallel", most="ranks")
    )
    micro_steps: Option[int, int] = Option(1, "backward passes of one step", _count("micro_steps"), core="micro_steps")
    layer_major: Option[bool, bool] = Option(
        False, "all micro-steps go through a layer before the next one: a trainer in C++ can", core="layer_major"
    )
    efficiency: Option[float | None, float | None] = Option(
        None,
        "the fraction of the peak that the whole model reaches; None: products by GPU, the rest by its memory",
        lambda given: read_efficiency(given),
    )
    compiled: Option[bool, bool] = Option(
        False, "what lies between products is fused, as by torch.compile(), and passes over memory less often"
    )
    optimizer: Option[str, str] = Option(
        "adamw",
        '"adamw", or another optimizer that the library knows; with "muon", AdamW has all but matrices of blocks',
        lambda given: one_of("optimizer", str(given).lower(), _core.optimizers()),
    )
    dtype: Option[str | None, str | None] = Option(None, "the parameters' format: bf16, fp16 or fp32; None: the model's own")
    lora: Option[int | None, int | None] = Option(
        None, "the rank of adapters on all matrices of blocks; the rest is frozen", _count("lora")
    )
    base_format: Option[str | None, str | None] = Option(
        None,
        "frozen matrices of blocks with `lora`: nf4, fp8 or bf16; None: as `dtype`",
        read_with=lambda given, of: read_base_format(given, of.lora),
    )
    resumable: Option[bool, bool] = Option(
        False, "True: all state is on drives, with the parameters, as with `wrap(run=...)`", core="full_records"
    )
    price: Option[float | None, float | None] = Option(
        None,
        "of one GPU for an hour, in any currency: the plan has the cost of a million tokens on all ranks",
        lambda given: read_price(given),
    )
    train_tokens: Option[Count | None, int | None] = Option(
        None, 'tokens of the whole training, such as "15T": the plan has its seconds and, with a price, its cost', parse_count
    )


@dataclass(kw_only=True, unsafe_hash=True)
class Options(ScheduleOptions, StepOptions, MachineOptions):
    """The options of `plan()`."""

    stage: Option[Stage, int | None] = replace(
        options_of(StepOptions)["stage"], default="auto", meaning='0 to 3; "auto": the planner chooses'
    )
    offload: Option[Offload | None, Any] = replace(
        options_of(StepOptions)["offload"],
        default="auto",
        meaning='"auto" chooses; "none", "host", "nvme"; or tiers, or fractions, by kind: "parameters=host,state=nvme"',
        read=lambda given: _read_offload(given),
    )
    state_format: Option[StateFormats | None, tuple[str, ...]] = replace(
        options_of(StepOptions)["state_format"], default="split"
    )
    replicas: Option[Replicas | None, Replicas] = replace(options_of(StepOptions)["replicas"], read_with=_copies)

    @property
    def device_name(self) -> str:
        """The name of the GPU. One whose memory and flops the caller gives needs no name."""
        is_described = self.gpu_memory is not None and self.flops is not None
        return self.gpu or (self.measured.device if self.measured else UNNAMED if is_described else USUAL_GPU)

    @property
    def hardware(self) -> Gpu:
        """The GPU. What the caller gives comes before what was measured, and this before data sheets."""
        measured = self.measured
        found = UNNAMED_GPU if self.device_name == UNNAMED else GPUS.get(self.device_name)
        if found is None:
            assert measured is not None
            found = replace(gpu_like(measured.device, measured.memory), memory=measured.memory)
        if self.is_on_cpu and self.host_memory is not None:
            found = replace(found, memory=self.host_memory // self.ranks_of_machine)
        return replace(
            found,
            memory=found.memory if self.gpu_memory is None else self.gpu_memory,
            flops=self.flops or (measured.flops if measured else found.flops),
        )

    @property
    def is_on_cpu(self) -> bool:
        return self.measured is not None and self.measured.on_cpu

    @property
    def has_one_pool(self) -> bool:
        """Whether the host's memory is the device's: on CPUs, and on GPUs that share it."""
        return self.is_on_cpu or self.hardware.one_pool

    @property
    def reach(self) -> float:
        """The flops that a GPU reaches: its peak times the efficiency, and all of what was measured."""
        usual = 1.0 if self.reaches_measured else self.hardware.reach
        return self.hardware.flops * (usual if self.efficiency is None else self.efficiency)

    @property
    def reaches_measured(self) -> bool:
        return self.measured is not None and self.flops is None

    @property
    def cores(self) -> int:
        return self.measured.cores if self.measured is not None else self.hardware.host.cores

    @property
    def passes(self) -> float:
        """How often memory is passed over between products; 0 where the flops that a GPU reaches are those of all of it."""
        if self.reaches_measured or self.efficiency is not None:
            return 0.0
        return FUSED_PASSES if self.compiled else EAGER_PASSES

    @property
    def room(self) -> Mapping[str, int]:
        """Bytes of a rank outside its device, by tier. A host that shares the device's memory has none."""
        host = 0 if self.has_one_pool else (self.host_memory or 0) // self.ranks_of_machine
        used = self.host_reserve + self.left_free["host"]
        return {"host": host - used, "nvme": (self.drive_space or 0) // self.ranks_of_machine}

    @property
    def left_free(self) -> Mapping[str, int]:
        """Bytes of a rank that the plan leaves free, by tier: activations are estimated, and allocators leave gaps. Of a small
        host the system takes all."""
        host = 0 if self.has_one_pool else (self.host_memory or 0) // self.ranks_of_machine
        host_free = min(int(host * self.headroom), host - self.host_reserve)
        return {"device": int(self.hardware.memory * self.headroom), "host": host_free}

    @property
    def reserved(self) -> int:
        """Bytes of a rank's device that the plan leaves to CUDA, NCCL and cuBLAS; on a CPU to Python and torch. Of memory
        that a GPU shares with the host, the system takes as much as of another host."""
        if self.reserve is not None:
            return self.reserve
        if self.is_on_cpu:
            return RESERVE_ON_CPU
        hardware = self.hardware
        has_links = hardware.has_nvlink or self.all_rates.peers > hardware.host_link
        of_system = reserve_of_host(hardware.memory, 1) if hardware.one_pool else 0
        return of_system + usual_reserve(self.ranks_of_machine if has_links else 1)

    @property
    def host_reserve(self) -> int:
        """Bytes of a rank's part of the host that the plan leaves to the system and torch; `reserve` is that of CPUs."""
        if self.has_one_pool or self.host_memory is None:
            return 0
        return reserve_of_host(self.host_memory, self.ranks_of_machine)

    @property
    def not_given(self) -> list[str]:
        """The tiers of the machine that the caller has not named. A host that shares the device's memory is none."""
        names = ("drive_space",) if self.has_one_pool else ("host_memory", "drive_space")
        return [name for name in names if getattr(self, name) is None]

    @property
    def chooses_tiers(self) -> bool:
        return self.offload in ("auto", "none")

    @property
    def divides_state(self) -> bool:
        """Whether the planner may divide a kind of state among tiers. A run that resumes has its state on drives."""
        return self.chooses_tiers and not self.resumable

    @property
    def sent(self) -> Wire:
        """The formats on the wire. One rank sends nothing."""
        return self.wire if self.ranks_of_host > 1 else Wire()

    @property
    def hosts(self) -> int:
        """The hosts that train on their own; 1 without an outer optimizer."""
        return hosts_of(self.outer, self.ranks, self._most_of_machine)

    @property
    def ranks_of_host(self) -> int:
        """The ranks that make each step together: all of them without an outer optimizer."""
        return self.ranks // self.hosts

    @property
    def ranks_of_machine(self) -> int:
        return min(self.ranks, self._most_of_machine)

    @property
    def _most_of_machine(self) -> int:
        return 1 if not self.is_on_cpu and self.hardware.one_pool else self.gpus_per_machine

    @property
    def all_rates(self) -> Rates:
        if self.measured is not None and self.is_on_cpu:
            return replaced_rates(rates_of_cpus(self.measured.cores), self.rates)
        return rates_of(self.hardware, self.rates, ranks_of_machine=self.ranks_of_machine)


def reserve_of_host(size: int, ranks: int) -> int:
    """Return the bytes of each rank's part of a host to leave to the system and torch."""
    pages = size // PAGES
    usual = min(pages + RESERVE_OF_MACHINE + ranks * RESERVE_OF_RANK, size // 8)
    return min(size, max(usual, pages + LEAST_OF_MACHINE)) // ranks


def usual_reserve(linked: int) -> int:
    """Return the bytes of a GPU to leave to CUDA, NCCL and cuBLAS, where links of their own join this many GPUs of a machine.

    >>> [usual_reserve(linked) >> 20 for linked in (1, 2, 8, 72)]
    [2048, 2486, 5120, 5120]
    """
    return RESERVE + RESERVE_OF_PEERS * min(linked - 1, COUNTED_PEERS) // COUNTED_PEERS


def read_headroom(value: object) -> float:
    """Return the fraction of the memory that is left free.

    >>> read_headroom(0), read_headroom("5%"), read_headroom("0.1")
    (0.0, 0.05, 0.1)
    """
    text = str(value).strip()
    try:
        fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        fraction = math.nan
    if isinstance(value, bool) or not 0 <= fraction < 1:
        refuse_value("headroom", value, 'a fraction of the memory from 0 on, below 1, such as 0.05 or "5%"')
    return fraction


NOT_IN_TABLE = "For another one leave out gpu (--gpu), and give gpu_memory, flops and rates (--gpu-memory, --flops, --rate)."


def read_gpu(name: object, measured: Measured | None) -> str | None:
    """Return the name of a GPU in the table, or None for none. Ranks that were measured on CPUs have none."""
    if name is None:
        return None
    if measured is not None and measured.on_cpu:
        refuse(
            f"cannot plan for gpu={name!r} with figures that were measured on CPUs: both name the device of a rank",
            needed="gpu, or measured",
            remedy="Leave out one of them. Rates of the host and of drives can be given with rates (--rate).",
        )
    return one_of("GPU", gpu_called(str(name)), GPUS, remedy=NOT_IN_TABLE)


def read_base_format(value: str | None, lora: int | None) -> str | None:
    if value is not None and lora is None:
        refuse_value("base_format", value, "lora, which freezes the parameters of the base")
    return None if value is None else one_of("base_format", value, BASE_FORMATS)


def read_rates(rates: Mapping[str, Rate] | None, measured: Measured | None) -> Mapping[str, Rate]:
    """Return the measured rates and the caller's, after a check that all are known and can be read."""
    rates_of(GPUS[USUAL_GPU], rates or {})
    return {**(measured.rates if measured else {}), **(rates or {})}


def read_efficiency(value: float) -> float:
    if not 0 < value <= 1:
        refuse_value("efficiency", value, "above 0, and 1 at most")
    return value


def read_price(value: float | None) -> float | None:
    if value is not None and not (is_number(value) and 0 < value < math.inf):
        refuse_value("price", value, "the price of one GPU for an hour: a number above 0, and finite")
    return None if value is None else float(value)


def _read_offload(value: Offload) -> Offload:
    if isinstance(value, str) and "=" not in value:
        return one_of("offload", value, OFFLOADS, or_else='tiers by kind such as "parameters=host,state=nvme"')
    by_kind: dict[str, Any] = dict(texts_by_name("offload=", value) if isinstance(value, str) else value)
    all_known("kind of state", by_kind, KINDS)
    for tiers in by_kind.values():
        all_known("tier", fractions_of(tiers), TIERS)
    return by_kind


def read_activations(value: Size | None) -> TreatedActivations:
    """Return a size, or the word that says how to estimate it; and the tier where they are until backward.

    >>> for value in ("checkpointed,host", "nvme", "1KiB", None):
    ...     print(*read_activations(value))
    checkpointed host
    kept nvme
    1024 device
    checkpointed device
    """
    value = "checkpointed" if value is None else value
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else [value]
    tier = str(words.pop()) if words[-1] in AWAY else "device"
    if len(words) > 1 or (words and words[0] in AWAY):
        refuse(f'cannot read activations "{value}"', needed=f'one amount and one tier, such as "checkpointed,{AWAY[0]}"')
    amount = words[0] if words else "kept"
    if isinstance(amount, str) and not amount[:1].isdigit():
        one_of("treatment of activations", amount, (*TREATMENTS, *AWAY))
        return TreatedActivations(amount, tier)
    return TreatedActivations(parse_size(amount), tier)
