"""The trainings of a run: which model, by which system, and where its state is. They fit one GPU of 139 GiB with 128 GiB of
host memory, 16 cores and 64 GiB of disk; test_trainings.py plans each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LENGTH = 2048
CHUNK = 2048  # tokens whose logits are there at once, where blocks are checkpointed


@dataclass(frozen=True)
class Case:
    """A training. `estimate_s` is what it takes on an H200, with the start of its process."""

    about: str
    model: str  # a name of llama.CONFIGS
    system: str  # a name of trainings.SYSTEMS
    estimate_s: int
    steps: int = 20
    sequences: int = 4
    is_checkpointed: bool = False
    is_deferred: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # of ballast.wrap()

    @property
    def tokens(self) -> int:
        return self.sequences * LENGTH


def ballast_case(about: str, model: str, estimate_s: int, **more: Any) -> Case:
    names = ("steps", "sequences", "is_checkpointed", "is_deferred")
    own = {name: more.pop(name) for name in names if name in more}
    return Case(about, model, "ballast", estimate_s, options=more, **own)


BF16 = {"gradient_format": "bf16"}
COMPACT = {"state_format": "compact", **BF16}
ON_HOST = {"offload": {"state": "host"}}
IN_BACKWARD = {"stage": 3, "update_in_backward": True}
ON_DRIVE = {"state": "nvme:DRIVE"}  # DRIVE becomes a folder
LARGE = {"is_deferred": True, "is_checkpointed": True}

CASES = {
    "1b-bf16": Case("torch's AdamW on bf16, without masters", "1b", "torch", 11),
    "1b-masters": Case("torch's AdamW on fp32 masters", "1b", "masters", 12),
    "1b-fsdp2": Case("FSDP2 with fp32 parameters, products in bf16", "1b", "fsdp2", 13),
    "1b": ballast_case("Ballast, split state", "1b", 12),
    "32b": ballast_case(
        "parameters and 0.3 of the compact state on the GPU, the rest on the host; updated in backward",
        "32b",
        95,
        steps=6,
        offload={"state": {"device": 0.3, "host": 0.7}},
        **LARGE,
        **COMPACT,
        **IN_BACKWARD,
    ),
    "1b-host": ballast_case("state on the host, stage 2", "1b", 12, **ON_HOST),
    "1b-host-3": ballast_case("state on the host, stage 3", "1b", 12, stage=3, **ON_HOST),
    "1b-host-early": ballast_case("state on the host, updated in backward", "1b", 12, **IN_BACKWARD, **ON_HOST),
    "1b-torchao": Case("torchao's offload of state and updates", "1b", "torchao", 14),
    "8b": ballast_case("compact state on the GPU", "8b", 22, steps=8, is_deferred=True, **COMPACT),
    "8b-host": ballast_case("split state on the host", "8b", 35, steps=6, is_deferred=True, **BF16, **ON_HOST),
    "8b-host-compact": ballast_case("compact state on the host", "8b", 28, steps=8, is_deferred=True, **COMPACT, **ON_HOST),
    "14b-host-compact": ballast_case(
        "compact state on the host", "14b", 45, steps=6, sequences=8, **LARGE, **COMPACT, **ON_HOST
    ),
    "1b-drive": ballast_case("compact state on the drive", "1b", 38, steps=4, offload=ON_DRIVE, **COMPACT),
}
