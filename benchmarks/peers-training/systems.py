"""The systems and their options: those that each system's own documentation recommends on such machines."""

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
    peer("ZeroRedundancyOptimizer", "Zero"),
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

LEGEND = """\
All train the same model on the same text, from the same parameters, with AdamW; one core and OMP_NUM_THREADS=1 for each rank.
the model alone          forward and backward on every rank, without optimizer and communication: the limit
the model and its update the same, and torch's fused AdamW on a rank's share of fp32 values, without any communication
DDP                      gradient_as_bucket_view=True; no_sync() while accumulating; AdamW(fused=True)
ZeroRedundancyOptimizer  around DDP as above; parameters_as_bucket_view=True, AdamW(fused=True)
FSDP2                    fully_shard() of each block, then of the model; gradients are reduced once a step; AdamW(fused=True)
DeepSpeed                its CPU Adam with fp32 master; bf16; contiguous_gradients, overlap_comm; buckets as Transformers
                         sets them; on the drive: pipelined reads and writes, aio of 1 MiB blocks, depth 32
Ballast                  ballast.wrap(optimizer, model, stage=...); fp32 master and moments; "compact state" is
                         state_format="compact": moments in a byte each, and a master of 8 bits more than the parameter;
                         "4-bit state" is state_format="4bit": moments in half a byte each, and the same master;
                         "gradients in bf16" is gradient_format="bf16", where gradients are else kept in fp32
torch's AdamW keeps moments in bf16, and no master, where parameters are bf16.
"""
