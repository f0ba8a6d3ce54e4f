"""Read the file of `ballast bench --output`: what a machine reached, for the planner."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.checks import is_number, refuse

VERSION = 1
CPU = "cpu"  # the device of ranks without a GPU
MOST = 1e21  # of a figure
WRITER = "a file of ballast bench --output"
RATES_MEASURED = ("peers", "upload", "download", "device_memory", "host_memory", "read", "write")


@dataclass(frozen=True)
class Measured:
    """What a machine reached. Rates are in bytes a second; those of shared resources are of all ranks together."""

    device: str  # the name of the GPU, or "cpu"
    memory: int  # of a rank's device
    flops: float  # of a rank, in forward and backward passes
    rates: Mapping[str, float]
    cores: int
    busy: bool  # other processes took part of the machine

    @property
    def on_cpu(self) -> bool:
        return self.device == CPU

    def notes(self) -> tuple[str, ...]:
        """Return what a plan says about these figures."""
        words = "rates were measured while other processes used the machine: an idle one is faster"
        return (words,) if self.busy else ()


def read_measured(given: str | os.PathLike[str]) -> Measured:
    """Return the figures of a file that `ballast bench` has written."""
    path = Path(given)
    if not path.is_file():
        refuse(f"cannot read {path}: it does not exist", needed=WRITER)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        refuse(f"cannot read {path}: it is not JSON", where=str(problem), needed=WRITER)
    if not isinstance(found, dict) or found.get("ballast_bench") != VERSION:
        refuse(f"cannot read {path}: it has no figures of this version of ballast bench", needed=f"{WRITER}, version {VERSION}")
    measured = found.get("measured")
    rates = measured.get("rates") if isinstance(measured, dict) else None
    if not isinstance(measured, dict) or not isinstance(rates, dict):
        refuse(f"cannot read {path}: it has no rates", where="measured", needed=WRITER)
    memory, flops, cores = (_positive(measured.get(name), name, path) for name in ("memory", "flops", "cores"))
    known = {name: _positive(rate, name, path) for name, rate in rates.items() if name in RATES_MEASURED}
    return Measured(str(measured.get("device", CPU)), int(memory), flops, known, int(cores), bool(found.get("busy")))


def _positive(figure: Any, name: str, path: Path) -> float:
    if not is_number(figure) or not 0 < figure <= MOST:  # NaN is neither
        refuse(f"cannot read {path}: {name} is {figure!r}", where="measured", needed="a number above 0")
    return float(figure)
