"""The cases: hosts, ranks and links; what trains; and what each link must carry."""

from typing import NamedTuple

from comparisons import SMALL, WORKLOADS, Workload
from sites import SITES, Site
from systems import ALONE, DDP, FSDP, SYSTEMS, System, deepspeed_name

HYBRID = "FSDP2, hybrid"
OVERLAPPED = "Ballast stage 2, overlapped"
INT8 = "codes of 8 bits"
NAMES = [ALONE, DDP, FSDP, *(deepspeed_name(stage) for stage in (1, 2, 3)), *(f"Ballast stage {stage}" for stage in (1, 2, 3))]
TRAINED = [
    *(system for system in SYSTEMS if system.name in NAMES),
    System(HYBRID, "HybridFsdp", {}, (ALONE, DDP)),
    System(OVERLAPPED, "Ballast", {"stage": 2, "overlap_gathers": True}, (ALONE, DDP)),
    System(f"Ballast stage 2, {INT8}", "Ballast", {"stage": 2, "wire": {"reduce": "int8"}}, (ALONE, DDP)),
    System(f"Ballast stage 3, {INT8}", "Ballast", {"stage": 3, "wire": "int8"}, (ALONE, DDP)),
]

# How often all parameters cross a link in a step, apart from the host's own share: a reduction, and a gather after it.
# Gathers in backward, and in forward, are separate where each parameter is freed after its use.
CROSSINGS = {ALONE: 0, DDP: 2, FSDP: 3, deepspeed_name(3): 3, "Ballast stage 3": 3, f"Ballast stage 3, {INT8}": 3}
CROSSINGS_OTHERWISE = 2
# How many of the crossings are codes, with 132 bytes for 128 values.
ENCODED = {f"Ballast stage 2, {INT8}": 1, f"Ballast stage 3, {INT8}": 3}
CODE_BYTES = 132 / 128


SHORT = Workload("30M, fp32", SMALL._replace(context=32, steps=3), dtype="float32")  # for processors that know no bf16


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
        encoded = ENCODED.get(self.system.name, 0)
        bytes_of_value = encoded * CODE_BYTES + (crossings - encoded) * width
        return bytes_of_value * parameters * (self.site.hosts - 1) / self.site.hosts

    @property
    def link_seconds(self) -> float:
        return self.needed_bytes / self.site.link.bytes_per_second

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
