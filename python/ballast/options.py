"""What `plan()` can be asked, and what that means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from ballast import _core
from ballast.checks import all_known, one_of, refuse
from ballast.hardware import GPUS, Gpu, Rates, rates_of
from ballast.places import KINDS, TIERS, Offload, fractions_of
from ballast.sizes import Rate, Size, parse_size

OFFLOADS = ("auto", "none", "host", "nvme")


class PlanOptions(TypedDict, total=False):
    """The keywords of `plan()` and `front()`. Sizes and rates are numbers, or text such as "80GiB" and "25GB/s"."""

    ranks: int  # GPUs in all; 1
    gpus_per_machine: int  # 8, or all where there are fewer
    stage: int | str  # 0 to 3, or "auto"
    offload: Offload  # "auto", "none", "host", "nvme", or a tier (or fractions of tiers) for each kind of state
    gpu: str  # one of hardware.GPUS; "a100"
    gpu_memory: Size  # instead of that GPU's
    host_memory: Size  # of a machine; without it nothing is kept on the host
    drives: Size  # free space on a machine's drives; without it nothing is kept there
    rates: Mapping[str, Rate]  # the fields of hardware.Rates
    reserve: Size  # of each GPU, for CUDA, NCCL and the allocator's gaps; 2 GiB
    activations: Size | str  # "checkpointed" or "kept", both estimated; or a size
    tokens: int  # of a rank, in one micro-step; 8192
    sequence: int  # 4096, or `tokens` where that is fewer
    micro_steps: int  # 1
    efficiency: float  # how much of the GPU's peak the trainer's arithmetic reaches; 0.5
    optimizer: str  # "adamw"
    format: str  # what the optimizer keeps: "fp32", "split", "bf16", "compact"
    dtype: str  # of the parameters, instead of the model's
    clipping: bool  # True; without it updates are made in the backward pass
    resumable: bool  # False; as with run=: what is on drives holds parameters too


@dataclass(frozen=True)
class Options:
    """The same, read and checked."""

    ranks: int = 1
    gpus_per_machine: int = 8
    stage: int | None = None
    offload: Offload = "auto"
    gpu: str = "a100"
    gpu_memory: int | None = None
    host_memory: int = 0
    drives: int = 0
    rates: Mapping[str, Rate] = field(default_factory=dict)
    reserve: int = 2 << 30
    activations: int | str = "checkpointed"
    tokens: int = 8192
    sequence: int = 4096
    micro_steps: int = 1
    efficiency: float = 0.5
    optimizer: str = "adamw"
    format: str = "split"
    dtype: str | None = None
    clipping: bool = True
    resumable: bool = False

    @property
    def hardware(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def chooses_places(self) -> bool:
        return self.offload in ("auto", "none")

    @property
    def ranks_of_machine(self) -> int:
        return min(self.ranks, self.gpus_per_machine)

    @property
    def all_rates(self) -> Rates:
        return rates_of(self.hardware, self.rates)


def read(given: Mapping[str, Any]) -> Options:
    """Checks everything that can be checked without the model.

    >>> read({"rank": 8})
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 there is no option "rank"
      needed:    one of ranks, gpus_per_machine, ...
      remedy:    Did you mean "ranks"?
    ...
    """
    all_known("option", given, (known.name for known in fields(Options)))
    readers: dict[str, Callable[[Any], Any]] = {
        "stage": read_stage,
        "offload": _offload,
        "rates": dict,
        "activations": _activations,
    }
    for name in ("gpu_memory", "host_memory", "drives", "reserve"):
        readers[name] = parse_size
    for name in ("ranks", "gpus_per_machine", "tokens", "sequence", "micro_steps"):
        readers[name] = _positive(name)
    for name, kind, known in (
        ("gpu", "GPU", GPUS),
        ("optimizer", "optimizer", _core.optimizers()),
        ("format", "state format", [format.name for format in _core.StateFormat]),
    ):
        readers[name] = _word(kind, list(known))
    options = Options(**{name: readers.get(name, _as_it_is)(value) for name, value in given.items()})
    if not 0 < options.efficiency <= 1:
        refuse(f"efficiency={options.efficiency} was asked for", needed="above 0, and 1 at most")
    rates_of(options.hardware, options.rates)
    return options


def _as_it_is(value: Any) -> Any:
    return value


def _word(kind: str, known: list[str]) -> Callable[[Any], str]:
    return lambda word: one_of(kind, str(word).lower(), known)


def _positive(name: str) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(f"{name}={value!r} was asked for", needed="a whole number from 1 on")
        return value

    return check


def read_stage(value: Any) -> int | None:
    """None: to be chosen."""
    if value == "auto":
        return None
    if str(value) not in ("0", "1", "2", "3"):
        refuse(f"stage {value} was asked for", needed='0, 1, 2, 3 or "auto"')
    return int(value)


def _offload(value: Any) -> Offload:
    if isinstance(value, str):
        return one_of("offload", value, OFFLOADS)
    all_known("kind of state", value, KINDS)
    for place in value.values():
        all_known("tier", fractions_of(place), TIERS)
    return dict(value)


def _activations(value: Any) -> int | str:
    if isinstance(value, str) and not value[:1].isdigit():
        return one_of("way with activations", value, ("checkpointed", "kept"))
    return parse_size(value)
