"""Run gpt.py twice on the same ranks, in plain PyTorch and with the one added line, and compare the trainings.

It shows both loss curves, tokens a second, and what a rank keeps in memory and on the drive. It trains in fp32, where both
compute the same, and exits with 1 if the losses differ by more than the order of sums explains. It passes other options on to
gpt.py. ./quickstart calls it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ballast

SCRIPT = Path(__file__).with_name("gpt.py")
MODEL = "--layers 6 --width 640 --context 128 --sequences 4 --steps 8 --dtype float32".split()
TOLERANCE = 1e-4  # the largest difference between two losses


class Ranks(NamedTuple):
    number: int
    where: str
    environment: dict[str, str]


def ranks_of_machine() -> Ranks:
    """Return two ranks on GPUs if Ballast can use them, one rank if there is only one GPU, or else two ranks on CPUs."""
    found = ballast.this_machine()
    if not found["gpus"]:
        return Ranks(2, "2 ranks, each a process on this machine's CPUs", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if len(found["gpus"]) > 1 and not found["no_nccl_because"]:
        return Ranks(2, "2 ranks, each with a GPU", {**os.environ})
    return Ranks(1, "1 rank with a GPU (two ranks need two GPUs and NCCL)", {**os.environ})


def train(ranks: Ranks, options: list[str], added: list[str], folder: str) -> dict[str, Any]:
    results = Path(folder) / "results.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks.number)]
    command = [*launch, str(SCRIPT), *MODEL, *options, *added, "--json", str(results)]
    run = subprocess.run(command, env=ranks.environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"side_by_side: {' '.join(added) or 'plain PyTorch'} failed:\n{run.stdout}{run.stderr}")
    measured: dict[str, Any] = json.loads(results.read_text())
    return measured


def row(name: str, cells: list[str]) -> str:
    return f"{name:<34}" + "".join(f"{cell:>20}" for cell in cells)


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB" if count else "-"


def table(ranks: Ranks, runs: list[dict[str, Any]]) -> str:
    alone = "(DDP)" if ranks.number > 1 else "(alone)"
    lines = [row("", ["PyTorch", "with the line"]), row("", [alone, "(stage 3, NVMe)"])]
    for number, losses in enumerate(zip(*(run["losses"] for run in runs))):
        lines.append(row(f"loss of step {number + 1}", [f"{loss:.6f}" for loss in losses]))
    lines.append(row("tokens a second", [f"{median(run['tokens_per_second'][1:]):.0f}" for run in runs]))
    lines.append("peak memory of a rank")
    if any(run["gpu_bytes"] for run in runs):
        lines.append(row("  GPU", [mebibytes(run["gpu_bytes"]) for run in runs]))
    lines.append(row("  process, without torch", [mebibytes(run["process_bytes"]) for run in runs]))
    for tier, name in (("device", "device tier"), ("host", "host tier"), ("nvme", "drive")):
        lines.append(row(f"  Ballast: {name}", ["", mebibytes(runs[1]["held"][f"memory_bytes/{tier}"])]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="side_by_side.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", default=Path.cwd(), help="a directory on the drive that keeps the state (here)")
    options, model_arguments = parser.parse_known_args()
    ranks = ranks_of_machine()
    with tempfile.TemporaryDirectory(prefix="ballast-side-by-side-", dir=options.directory) as folder:
        runs = [train(ranks, model_arguments, added, folder) for added in ([], ["--stage", "3", "--offload", f"nvme:{folder}"])]
    print('    optimizer = ballast.wrap(optimizer, model, stage=3, offload="nvme:...")    # the one added line\n')
    print(f"    {ranks.where}\n")
    print(table(ranks, runs))
    difference = max(abs(a - b) for a, b in zip(*(run["losses"] for run in runs)))
    if difference > TOLERANCE:
        print(f"\nTHE LOSSES DIFFER by {difference:.1e}, but they must be equal. Please report this.")
        return 1
    print(f"\nThe losses are equal to {difference:.0e}; only the order of sums differs.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
