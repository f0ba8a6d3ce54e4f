"""Train with the program of `benchmarks/training` on a GPU, with everything on one tier, or compare what all tiers wrote."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

TIERS = {"device": "device", "host": "host", "drive": "nvme"}
# 110 million parameters: 1.1 GB of optimizer state, which the drive reads and writes in each step.
MODEL = ["--layers", "12", "--width", "768", "--heads", "12", "--context", "512", "--batch", "16", "--vocabulary", "32000"]
STEPS = ["--steps", "8", "--stage", "3", "--max-norm", "1"]


def command(tier: str, build: Path, work: Path, options: Sequence[str]) -> list[str]:
    """Return the command that trains with parameters and state on a tier. `options` come last, so they decide."""
    name = TIERS[tier]
    placed = ["--parameters", name, "--state", name]
    if tier == "drive":
        placed += ["--drive", str(work / "drive")]
    return [str(build / "benchmarks" / "benchmark_training"), *MODEL, *STEPS, *placed, "--hash", *options]


def losses_of(tier: str, work: Path) -> Path:
    return work / f"losses-{tier}.txt"


def train(tier: str, build: Path, work: Path, options: Sequence[str]) -> int:
    losses_of(tier, work).unlink(missing_ok=True)
    drive = work / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    lines = []
    try:
        trainer = subprocess.Popen(command(tier, build, work, options), stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None
        for line in trainer.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        code = trainer.wait()
    finally:
        shutil.rmtree(drive)
    if code == 0:
        *steps, last = map(json.loads, lines)
        losses = "".join(f"{step['step']} {step['loss']!r} {step['grad_norm']!r}\n" for step in steps)
        losses_of(tier, work).write_text(f"{losses}parameters {last['parameters_hash']}\n")
        rate = median(step["tokens_per_second"] for step in steps[1:])
        print(f"== {tier}: {rate:,.0f} tokens/s, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")
    return code


def compare(work: Path) -> int:
    """Compare the losses of the tiers that have trained, with all their bits. Two of them are needed."""
    written = {tier: losses_of(tier, work).read_text() for tier in TIERS if losses_of(tier, work).exists()}
    if len(written) < 2:
        print(f"== error: nothing to compare: {', '.join(written) or 'no tier'} has written losses")
        return 1
    first, *others = written
    differing = [tier for tier in others if written[tier] != written[first]]
    for tier in differing:
        print(f"== error: {tier} differs from {first}: {first_difference(written[first], written[tier])}")
    if not differing:
        print(f"== {', '.join(written)}: equal losses, norms and final parameters, bit by bit")
    return 1 if differing else 0


def first_difference(one: str, other: str) -> str:
    pairs = zip(one.splitlines(), other.splitlines())
    return next((f"{a} vs. {b}" for a, b in pairs if a != b), "one of them has fewer lines")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=[*TIERS, "compare"])
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="without a GPU, to try the command")
    given, options = parser.parse_known_args()
    if given.what == "compare":
        return compare(given.work)
    return train(given.what, given.build, given.work, options if given.cpu else ["--gpu", *options])


if __name__ == "__main__":
    sys.exit(main())
