"""The cases: each system at each of its stages, on two models, and what each case is compared with.

The options of the systems are those that each system's own documentation recommends on such machines.
"""

from typing import Any, NamedTuple


class System(NamedTuple):
    name: str
    trainer: str  # a class of trainers.py
    options: dict[str, Any]
    against: tuple[str, ...]  # names of other systems

    @property
    def is_ballast(self) -> bool:
        return self.trainer == "Ballast"

    @property
    def needs_bf16(self) -> bool:
        return "state_format" in self.options or "gradient_format" in self.options

    @property
    def trains(self) -> bool:
        return self.trainer != "Alone"

    @property
    def updates_in_backward(self) -> bool:
        return "update_in_backward" in self.options

    def __hash__(self) -> int:
        return hash(self.name)


ALONE = "the model alone"  # forward and backward alone: no system can be faster
UPDATED = "the model and its update"  # the same limit for systems with fp32 state
DDP = "DDP"
FSDP = "FSDP2"


def deepspeed_name(stage: int, place: str = "") -> str:
    return f"DeepSpeed ZeRO {stage}" + (f", state on the {place}" if place else "")


def peer(name: str, trainer: str, **options: Any) -> System:
    return System(name, trainer, options, (ALONE,) if name == DDP else (ALONE, DDP))


def deepspeed(stage: int, place: str = "", **options: Any) -> System:
    return peer(deepspeed_name(stage, place), "DeepSpeed", stage=stage, **options)


def ballast(stage: int, *what: str, place: str = "", **options: Any) -> System:
    """Return a system that is compared with the limits, with DDP, and with the systems that partition as much."""
    name = ", ".join([f"Ballast stage {stage}", *([f"state on the {place}"] if place else []), *what])
    limits = (ALONE, UPDATED) if stage > 0 and "state_format" not in options else (ALONE,)
    peers = (DDP, FSDP, deepspeed_name(stage, place)) if stage > 0 else (DDP,)
    return System(name, "Ballast", {"stage": stage, **options}, (*limits, *peers))


IN_BACKWARD = "updated in backward"
COMPACT = {"state_format": "compact"}
SMALLEST = {"state_format": "4bit"}


def compared_with(other: System, system: System) -> System:
    return system._replace(against=(*system.against, other.name))


# "nvme:" is completed with the directory of the run.
SYSTEMS = [
    System(ALONE, "Alone", {}, ()),
    System(UPDATED, "Alone", {"updates": True}, (ALONE,)),
    peer(DDP, "Ddp"),
    peer("ZeroRedundancyOptimizer", "Ddp", partitions=True),
    peer(FSDP, "Fsdp"),
    deepspeed(1),
    deepspeed(2),
    deepspeed(3),
    deepspeed(3, "host", offload="cpu"),
    deepspeed(3, "drive", offload="nvme:"),
    ballast(0),
    ballast(1),
    ballast(2),
    ballast(3),
    compared_with(ballast(3), ballast(3, "gradients in bf16", gradient_format="bf16")),
    ballast(3, "4-bit state, gradients in bf16", gradient_format="bf16", **SMALLEST),
    ballast(3, IN_BACKWARD, update_in_backward=True),
    ballast(3, IN_BACKWARD, "compact state", update_in_backward=True, **COMPACT),
    ballast(3, IN_BACKWARD, "4-bit state", update_in_backward=True, **SMALLEST),
    ballast(3, IN_BACKWARD, "4-bit state, gradients in bf16", update_in_backward=True, gradient_format="bf16", **SMALLEST),
    ballast(3, place="host", offload="host"),
    ballast(3, place="drive", offload="nvme:"),
    ballast(3, IN_BACKWARD, place="drive", update_in_backward=True, offload="nvme:"),
    ballast(3, IN_BACKWARD, "compact state", place="drive", update_in_backward=True, offload="nvme:", **COMPACT),
    ballast(3, IN_BACKWARD, "4-bit state", place="drive", update_in_backward=True, offload="nvme:", **SMALLEST),
]


# --- The models, and the cases ---


class Shape(NamedTuple):
    """A GPT of examples/gpt.py, and the sequences that a step of all ranks trains on."""

    name: str
    layers: int
    width: int
    context: int
    sequences: int
    steps: int  # the steps that are timed

    @property
    def tokens(self) -> int:
        return self.sequences * self.context


SMALL = Shape("30M", layers=6, width=640, context=256, sequences=4, steps=8)
LARGE = Shape("303M", layers=24, width=1024, context=64, sequences=4, steps=3)
LONG = LARGE._replace(context=256, sequences=32, steps=1)  # 4,096 tokens for each of two ranks

ADAMW, MUON = "AdamW", "Muon"  # Muon: for the matrices of blocks, with AdamW for all others

BRIEFLY = (ALONE, DDP, "Ballast stage 3")
# ZeroRedundancyOptimizer has one optimizer for all parameters, and FSDP2 with torch's Muon was not tried.
WITH_MUON = (
    *(ALONE, DDP, *(deepspeed_name(stage) for stage in (2, 3))),
    *(f"Ballast stage {stage}" for stage in (1, 2, 3)),
    *("Ballast stage 3, state on the host", "Ballast stage 3, state on the drive"),
)


class Workload(NamedTuple):
    """A training that is the same for all systems: model, ranks, format, accumulation, clipping and optimizer."""

    name: str
    shape: Shape
    ranks: int = 2
    dtype: str = "bfloat16"
    micro_steps: int = 1
    max_norm: float | None = None
    rule: str = ADAMW
    systems: tuple[str, ...] | None = None  # names; all if None

    @property
    def tokens(self) -> int:
        """The tokens of a step, of all ranks."""
        return self.shape.tokens * self.micro_steps

    def is_with_muon(self, other: "Workload") -> bool:
        """Whether this is the other one with Muon in place of AdamW."""
        return (self.rule, other.rule, self.shape) == (MUON, ADAMW, other.shape) and self.name == f"{other.name}, {MUON}"

    @property
    def title(self) -> str:
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        title = f"GPT of {self.shape.name} parameters in {dtype}, {self.tokens} tokens a step, {self.ranks} ranks"
        if self.micro_steps > 1:
            title += f", accumulated over {self.micro_steps} passes"
        title += "" if self.max_norm is None else ", clipped"
        return title if self.rule == ADAMW else f"{title}, {self.rule}"


WORKLOADS = [
    Workload("30M", SMALL),
    Workload("303M", LARGE),
    Workload("30M, accumulated and clipped", SMALL, micro_steps=4, max_norm=1.0),
    Workload("30M, fp32", SMALL, dtype="float32"),
    Workload("303M, fp32", LARGE, dtype="float32"),
    Workload("30M, 4 ranks", SMALL, ranks=4),
    Workload("303M, 4 ranks", LARGE, ranks=4),
    Workload("30M, fp32, 4 ranks", SMALL, ranks=4, dtype="float32"),
    Workload("30M, Muon", SMALL, rule=MUON, systems=WITH_MUON),
    Workload("30M, fp32, Muon", SMALL, dtype="float32", rule=MUON, systems=BRIEFLY),
    Workload("303M, Muon", LARGE, rule=MUON, systems=WITH_MUON),
    Workload("303M, 8,192 tokens", LONG, systems=BRIEFLY),
    Workload("303M, 8,192 tokens, Muon", LONG, rule=MUON, systems=BRIEFLY),
]


class Case(NamedTuple):
    workload: Workload
    system: System

    @property
    def name(self) -> str:
        return f"{self.workload.name}: {self.system.name}"

    @property
    def opponents(self) -> list["Case"]:
        """The cases that this one is compared with: of Muon, the same with AdamW too, if nothing else differs."""
        rivals = [case for case in CASES if case.workload == self.workload and case.system.name in self.system.against]
        with_adamw = [case for case in CASES if case.system == self.system and self.workload.is_with_muon(case.workload)]
        return rivals + (with_adamw if self.system.is_ballast else [])

    def name_beside(self, case: "Case") -> str:
        return self.system.name if self.workload == case.workload else f"{self.system.name}, {self.workload.rule}"

    @property
    def reference(self) -> "Case":
        """The case whose losses all others have to reach."""
        return self._of_system(DDP)

    @property
    def limit(self) -> "Case":
        return self._of_system(ALONE)

    def _of_system(self, name: str) -> "Case":
        return next(case for case in CASES if case.workload == self.workload and case.system.name == name)


def fits(workload: Workload, system: System) -> bool:
    return not (
        (system.needs_bf16 and workload.dtype != "bfloat16")
        or (system.updates_in_backward and (workload.micro_steps > 1 or workload.max_norm is not None))
        or (workload.systems is not None and system.name not in workload.systems)
    )


CASES = [Case(workload, system) for workload in WORKLOADS for system in SYSTEMS if fits(workload, system)]


def with_their_opponents(chosen: list[Case]) -> list[Case]:
    """Return the chosen cases with all that they are compared with. The opponents have a limit and a reference too."""
    compared = {each for case in chosen for each in (case, *case.opponents)}
    wanted = {each for case in compared for each in (case, case.limit, case.reference)}
    return [case for case in CASES if case in wanted]
