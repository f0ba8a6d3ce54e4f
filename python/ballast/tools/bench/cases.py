"""The cases of `ballast bench`: systems with their options, and the model that they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from ballast.checks import refuse

ALONE = "the model alone"
DDP = "DDP"
DRIVE = "DRIVE"  # stands for the directory of the run


@dataclass(frozen=True)
class Case:
    """A system, and the options of its call."""

    name: str
    system: str  # a key of ballast.tools.bench.systems.SYSTEMS
    options: Mapping[str, Any] = field(default_factory=dict)
    is_quick: bool = False  # measured with --quick, too
    on_gpu: bool | None = None  # None: on GPUs and on CPUs

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def trains(self) -> bool:
        return self.system != "alone"

    @property
    def is_ballast(self) -> bool:
        return self.system == "ballast"


def _ballast(stage: int, what: str = "", **more: Any) -> Case:
    """Return a case of `ballast.wrap()`."""
    offload = more.pop("offload", None)
    options = {"stage": stage} | ({} if offload is None else {"offload": offload})
    return Case(f"Ballast stage {stage}{what}", "ballast", options, **more)


ALL_AWAY = {"parameters": "host", "gradients": "host", "state": "host"}
CASES = (
    Case(ALONE, "alone", is_quick=True),
    Case(DDP, "ddp", is_quick=True),
    Case("FSDP2", "fsdp2"),
    Case("DeepSpeed ZeRO 2", "deepspeed", {"stage": 2}),
    Case("DeepSpeed ZeRO 3", "deepspeed", {"stage": 3}),
    _ballast(0),
    _ballast(2),
    _ballast(3, is_quick=True),
    _ballast(2, ", state on the host", offload={"state": "host"}, on_gpu=True, is_quick=True),
    _ballast(3, ", all on the host", offload=ALL_AWAY, on_gpu=True),
    _ballast(3, ", state on the drive", offload=f"nvme:{DRIVE}"),
)


@dataclass(frozen=True)
class Workload:
    """The model and the batch of a rank. A GPT of its own sizes, or the configuration of another model."""

    dtype: str
    sequences: int
    context: int
    seconds: float  # of timed steps, about
    layers: int
    width: int
    config: Mapping[str, Any] | None = None
    name: str = "GPT"
    reduced: str = ""  # the sizes of the configuration that are smaller than those of the whole model

    @property
    def tokens(self) -> int:
        return self.sequences * self.context

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def workload(*, on_gpu: bool, quick: bool, dtype: str | None) -> Workload:
    """Return the small GPT for GPUs or for CPUs."""
    seconds = 1.0 if quick else 4.0
    if on_gpu:
        return Workload(dtype or "bf16", sequences=8, context=1024, seconds=seconds, layers=12, width=1024)
    layers, width = (6, 384) if quick else (8, 512)
    return Workload(dtype or "fp32", sequences=1, context=128, seconds=seconds, layers=layers, width=width)


def cases(*, on_gpu: bool, quick: bool, only: Sequence[str]) -> list[Case]:
    """Return the cases to measure: those whose names contain one of the words of `only`, the default ones, or the quick ones.
    The model alone and DDP are always measured, because others are compared with them."""
    possible = [case for case in CASES if case.on_gpu in (None, on_gpu) and _is_installed(case)]
    if not only:
        return [case for case in possible if case.is_quick or not quick]
    chosen = [case for case in possible if any(word.lower() in case.name.lower() for word in only)]
    if not chosen:
        names = ", ".join(case.name for case in possible)
        refuse(f"there is no case whose name contains {' or '.join(only)}", needed=f"a part of one of these: {names}")
    return [case for case in possible if case in chosen or case.name in (ALONE, DDP)]


def _is_installed(case: Case) -> bool:
    return case.system != "deepspeed" or find_spec("deepspeed") is not None
