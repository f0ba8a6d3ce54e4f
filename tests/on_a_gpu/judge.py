"""Judge what a run has measured. Each verdict names what was found and what is needed; a missing figure is a verdict, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from on_a_gpu.cases import CASES

HOLDS, FAILS, MISSING = "holds", "fails", "not measured"
Figures = Mapping[str, Any]
GIB = 1 << 30

MOST_ERROR, MEDIAN_ERROR = 0.35, 0.15  # of forecasts: the bars of docs/benchmarks/forecasts.md
HOST_BYTES, GPU_BYTES = 128 * GIB, 140 * GIB
LEAST_PARAMETERS = 32e9

# Each row names two trainings and the largest relative difference of their losses. Both train on one batch and the same values.
LOSSES = [
    ("1b-fsdp2", "1b-masters", 0.01),
    ("1b", "1b-masters", 0.01),
    ("1b-host", "1b", 0.0),
    ("1b-host-3", "1b", 0.0),
    ("1b-host-early", "1b", 0.0),
    ("1b-torchao", "1b-bf16", 0.02),
    ("1b-drive", "1b", 0.03),
    ("8b-host-compact", "8b", 0.0),
    ("8b", "8b-host", 0.03),
]
# The least speed, relative to another system with its state in the same place.
SPEEDS = [("1b", "1b-masters", 1.0), ("1b", "1b-fsdp2", 1.0), ("1b-host", "1b-torchao", 1.0), ("1b-host-3", "1b-torchao", 1.0)]
# The least part of a rate that is measured on this machine. The parts of kernels are those of copies of the same bytes.
SHARES = [
    ("gpu: adamw fp32, whole", "gpu: copy", 0.85),
    ("gpu: adamw split, whole", "gpu: copy", 0.85),
    ("gpu: adamw bf16, whole", "gpu: copy", 0.8),
    ("gpu: adamw compact, whole", "gpu: copy", 0.4),
    ("gpu: adamw 4bit, whole", "gpu: copy", 0.35),
    ("gpu: upload in pieces of 2.00 MiB", "gpu: upload at once", 0.85),
    ("gpu: download in pieces of 2.00 MiB", "gpu: download at once", 0.85),
    ("gpu: upload and download together", "gpu: upload at once", 1.3),
    ("cpu: adamw fp32, whole", "cpu: copy", 0.9),
    ("cpu: adamw split, whole", "cpu: copy", 0.9),
    ("cpu: adamw bf16, whole", "cpu: copy", 0.8),
    ("cpu: adamw compact, whole", "cpu: copy", 0.65),
    ("cpu: adamw 4bit, whole", "cpu: copy", 0.55),
]
# The least rate of data sheets, in GB/s.
SHEETS = [("gpu: copy", "HBM3e of 4,800 GB/s", 4800, 0.85), ("gpu: upload at once", "PCIe 5 of 63 GB/s", 63, 0.75)]
# The least part of a link, of HBM or of DRAM that a lane of a training reaches while it works.
LANES = [
    ("8b-host", "upload", "gpu: upload at once", 0.8),
    ("8b-host", "download", "gpu: download at once", 0.8),
    ("8b-host", "host", "host", 0.8),
    ("8b-host-compact", "host", "host", 0.5),
    ("8b", "update", "gpu: copy", 0.4),
    ("32b", "upload", "gpu: upload at once", 0.8),
    ("1b-drive", "disk", "drive", 0.8),
]
TESTS = {
    "kernels-quick": "Kernels give the bits of the CPU",
    "llama-losses": "A model of 110M trains with the same bits on GPU, host and drive",
    "test-engine": "Training at each stage and tier, and NCCL",
    "test-python": "The Python package on the GPU",
    "memcheck": "compute-sanitizer finds no wrong access",
}


@dataclass(frozen=True)
class Verdict:
    """`what` is claimed and `needed`; `found` is what the run has measured."""

    what: str
    found: str
    needed: str
    result: str  # HOLDS, FAILS or MISSING


def verdict(what: str, found: str, needed: str, holds: bool | None) -> Verdict:
    return Verdict(what, found if holds is not None else "-", needed, MISSING if holds is None else HOLDS if holds else FAILS)


def judge_tests(outcomes: Mapping[str, str]) -> Iterator[Verdict]:
    for step, what in TESTS.items():
        outcome = outcomes.get(step, "-")
        holds = {"passed": True, "FAILED": False, "timed out": False}.get(outcome)
        yield verdict(what, outcome, "passed", holds)


def judge_losses(figures: Figures) -> Iterator[Verdict]:
    for name, other, tolerance in LOSSES:
        ours, theirs = (figures.get(each, {}).get("losses") for each in (name, other))
        needed = f"within {100 * tolerance:g} %" if tolerance else "equal bits"
        if ours is None or theirs is None:
            yield verdict(f"{name} vs. {other}", "", needed, None)
            continue
        error = largest_difference(ours, theirs)
        yield verdict(f"{name} vs. {other}", f"{100 * error:.2f} %", needed, error <= tolerance)
    for name in CASES:
        losses = figures.get(name, {}).get("losses")
        falls = None if losses is None else all(map(math.isfinite, losses)) and losses[-1] < losses[0]
        found = "" if losses is None else f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
        yield verdict(f"{name} learns", found, "finite, and falls", falls)


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest one relative to the loss, of the steps that both have made; infinite if a loss is not finite."""
    pairs = list(zip(ours, theirs))
    if not pairs or not all(map(math.isfinite, [each for pair in pairs for each in pair])):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in pairs)


def judge_speeds(figures: Figures) -> Iterator[Verdict]:
    for name, other, least in SPEEDS:
        seconds = [figures.get(each, {}).get("seconds") for each in (name, other)]
        ratio = seconds[1] / seconds[0] if all(seconds) else None
        found, holds = ("", None) if ratio is None else (f"{ratio:.2f} times", ratio >= least)
        yield verdict(f"Speed of {name} vs. {other}", found, f"{least:g} times as fast", holds)


def judge_rates(figures: Figures) -> Iterator[Verdict]:
    for name, words, sheet, least in SHEETS:
        yield share(name, words, rate_of(figures, name), sheet, least)
    for name, other, least in SHARES:
        yield share(name, other.partition(": ")[2], rate_of(figures, name), rate_of(figures, other), least)
    for case, lane, limit, least in LANES:
        rate = figures.get(case, {}).get(f"gb_per_second/{lane}")
        words = {"host": "DRAM", "drive": "the drive"}.get(limit, limit.partition(": ")[2])
        yield share(f"{case}: {lane}", words, rate, rate_of(figures, limit), least)


def rate_of(figures: Figures, name: str) -> float | None:
    found = figures.get(name, {})
    return found.get({"host": "stream", "drive": "read"}.get(name, "value"))


def share(what: str, of: str, rate: float | None, limit: float | None, least: float) -> Verdict:
    needed = f"{least:.2f} of {of}"
    if rate is None or not limit:
        return verdict(what, "", needed, None)
    return verdict(what, f"{rate:,.1f} GB/s, {rate / limit:.2f}", needed, rate / limit >= least)


def errors_of_forecasts(figures: Figures, which: str) -> dict[str, float]:
    """Return measured over forecast seconds, less one, by case."""
    found = {}
    for name in CASES:
        case = figures.get(name, {})
        if case.get("seconds") and case.get(which):
            found[name] = case["seconds"] / case[which] - 1
    return found


def judge_forecasts(figures: Figures) -> Iterator[Verdict]:
    words = {"forecast_seconds": "before the day", "forecast_here_seconds": "with the rates of this machine"}
    for which, when in words.items():
        errors = errors_of_forecasts(figures, which)
        worst = max(errors, key=lambda name: abs(errors[name]), default="")
        middle = median(map(abs, errors.values())) if errors else None
        found = f"{100 * middle:.0f} % of {len(errors)}" if middle is not None else ""
        needed = f"median of at most {100 * MEDIAN_ERROR:.0f} %"
        yield verdict(f"Error of the forecasts {when}", found, needed, None if middle is None else middle <= MEDIAN_ERROR)
        found = f"{100 * errors[worst]:+.0f} % ({worst})" if worst else ""
        holds = abs(errors[worst]) <= MOST_ERROR if worst else None
        yield verdict(f"Worst forecast {when}", found, f"at most {100 * MOST_ERROR:.0f} %", holds)
    for name in CASES:
        case = figures.get(name, {})
        planned, used = case.get("planned_bytes"), case.get("used_bytes")
        if CASES[name].system == "ballast":
            holds = used <= planned if planned and used else None
            found = f"{used / GIB:.1f} GiB" if holds is not None else ""
            needed = f"at most the planned {planned / GIB:.1f} GiB" if planned else "at most as planned"
            yield verdict(f"{name}: memory of the GPU", found, needed, holds)


def judge_headline(figures: Figures) -> Verdict:
    """Judge that all parameters of the largest model train on one GPU."""
    case = figures.get("32b", {})
    what = "All 32B parameters train on one GPU with 128 GiB of host memory"
    needed = "losses that fall, in the memory of the machine"
    if not case.get("losses") or case.get("device") != "cuda":
        return verdict(what, "", needed, None)
    losses, host = case["losses"], case.get("memory_bytes/host", 0)
    fits = host <= HOST_BYTES and case.get("used_bytes", 0) <= GPU_BYTES
    learns = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    speed = f"{case['tokens'] / case['seconds']:,.0f} tokens/s, " if case.get("seconds") else ""
    found = f"{speed}{case.get('used_bytes', 0) / GIB:.0f} GiB of the GPU, {host / GIB:.0f} GiB of the host"
    return verdict(what, found, needed, fits and learns and case.get("parameters", 0) >= LEAST_PARAMETERS)


def judged(figures: Figures, outcomes: Mapping[str, str]) -> dict[str, list[Verdict]]:
    """Return the verdicts by heading, the most telling first."""
    return {
        "The largest model": [judge_headline(figures)],
        "Equal values": [*judge_tests(outcomes), *judge_losses(figures)],
        "Speed": list(judge_speeds(figures)),
        "Forecast and measurement": list(judge_forecasts(figures)),
        "Links, DRAM and HBM": list(judge_rates(figures)),
    }
