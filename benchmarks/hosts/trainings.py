"""The cases: hosts, ranks and links; what trains; and what each link must carry.

trainings.py CASE DIRECTORY TEXT trains one rank of an imitated host. Its first rank counts what the link of a host sent.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import network
from network import SITES, Site
from systems import ALONE, DDP, FSDP, SMALL, SYSTEMS, WORKLOADS, System, Workload, deepspeed_name, peer

HYBRID = "FSDP2, hybrid"
WAITING = "not overlapped"
OVERLAPPED = "overlapped"  # an option sets this; the plain case does it by itself
TWICE = "gathered twice"
ONCE = "gathered once"  # an option sets this; the plain case does it by itself after some steps
FURTHER = "two units ahead"
INT8 = "codes of 8 bits"
INT4 = "gradients in codes of 4 bits"
KEPT, FREED = {"keep_gathered": True}, {"keep_gathered": False}
SMALL_GRADIENTS = {"gather": "int8", "reduce": "int4"}
NAMES = [ALONE, DDP, FSDP, *(deepspeed_name(stage) for stage in (1, 2, 3)), *(f"Ballast stage {stage}" for stage in (1, 2, 3))]


def ours(stage: int, what: str, **options: Any) -> System:
    return peer(f"Ballast stage {stage}, {what}", "Ballast", stage=stage, **options)


# The systems that send codes, with the bytes of those crossings that are codes, for each value: a block of 128 values has 4
# bytes more.
BYTES_OF_INT8, BYTES_OF_INT4 = 132 / 128, 68 / 128
ENCODED = {
    ours(2, INT8, wire={"reduce": "int8"}): [BYTES_OF_INT8],
    ours(3, INT8, wire="int8", **FREED): 3 * [BYTES_OF_INT8],
    ours(2, INT4, wire={"reduce": "int4"}): [BYTES_OF_INT4],
    ours(3, INT4, wire=SMALL_GRADIENTS, **FREED): [BYTES_OF_INT8, BYTES_OF_INT8, BYTES_OF_INT4],
    ours(3, f"{ONCE}, {INT8}", wire="int8", **KEPT): 2 * [BYTES_OF_INT8],
    ours(3, f"{ONCE}, {INT4}", wire=SMALL_GRADIENTS, **KEPT): [BYTES_OF_INT8, BYTES_OF_INT4],
}
TRAINED = [
    *(system for system in SYSTEMS if system.name in NAMES),
    peer(HYBRID, "Fsdp", hybrid=True),
    *(ours(stage, what, overlap_gathers=what == OVERLAPPED) for stage in (1, 2) for what in (WAITING, OVERLAPPED)),
    ours(3, TWICE, **FREED),
    ours(3, FURTHER, prefetch=2, **FREED),
    ours(3, ONCE, **KEPT),
    *ENCODED,
]

# How often all parameters cross a link in a step, apart from the host's own share: a reduction, and a gather after it.
# Gathers in backward, and in forward, are separate where each parameter is freed after its use.
FREEING = [FSDP, deepspeed_name(3), *(system.name for system in TRAINED if system.options.get("keep_gathered") is False)]
CROSSINGS = {ALONE: 0, **{name: 3 for name in FREEING}}
CROSSINGS_OTHERWISE = 2

SHORT = Workload("30M, fp32", SMALL._replace(context=32, steps=3), dtype="float32")  # some processors know no bf16


class Case(NamedTuple):
    site: Site
    workload: Workload
    system: System

    @property
    def name(self) -> str:
        return f"{self.site.name}, {self.workload.name.removesuffix(', 4 ranks')}: {self.system.name}"

    @property
    def needed_bytes(self) -> float:
        """The bytes that a host's link must send in a step, at least: nothing is sent twice, or to a rank of its own host."""
        shape = self.workload.shape
        parameters = shape.layers * (12 * shape.width**2 + 13 * shape.width) + (2 * 256 + shape.context + 2) * shape.width
        crossings = CROSSINGS.get(self.system.name, CROSSINGS_OTHERWISE)
        width = 2 if self.workload.dtype == "bfloat16" else 4
        encoded = ENCODED.get(self.system, [])
        bytes_of_value = sum(encoded) + (crossings - len(encoded)) * width
        return bytes_of_value * parameters * (self.site.hosts - 1) / self.site.hosts

    @property
    def link_seconds(self) -> float:
        return self.needed_bytes / self.site.link.bytes_per_second

    @property
    def reference(self) -> "Case":
        """The case whose losses all others have to reach."""
        return self.of(DDP)

    def of(self, name: str) -> "Case":
        """Return the case of another system in the same place."""
        return next(case for case in CASES if case[:2] == self[:2] and case.system.name == name)


def workload_of(site: Site, model: str) -> Workload:
    ranks = site.hosts * site.ranks
    if model == SHORT.name:
        return SHORT._replace(name=f"{model}, {ranks} ranks", ranks=ranks) if ranks > 2 else SHORT
    name = model if ranks == 2 else f"{model}, {ranks} ranks"
    return next(workload for workload in WORKLOADS if workload.name == name)


CASES = [
    Case(site, workload_of(site, model), system)
    for model in ("30M", "303M", SHORT.name)
    for site in SITES
    for system in TRAINED
    if system.trainer != "DeepSpeed" or model != SHORT.name  # its CPU Adam trains what is bf16
]


def with_references(chosen: list[Case]) -> list[Case]:
    """Return the chosen cases with those that they are compared with."""
    wanted = {case.name for each in chosen for case in (each, each.of(ALONE), each.of(DDP))}
    return [case for case in CASES if case.name in wanted]


def main() -> None:
    import trainers  # needs torch, which --list does without

    name, directory, text = sys.argv[1:]
    case = next(each for each in CASES if each.name == name)
    is_first = os.environ["LOCAL_RANK"] == "0"
    count = lambda: {"sent_bytes": network.sent_bytes()} if is_first else {}
    trainers.train(case.system, case.workload, Path(directory), Path(text), count)


if __name__ == "__main__":
    main()
