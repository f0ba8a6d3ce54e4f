"""Train a small GPT on two ranks, first in memory and then with its state on the drive, and compare the results.

The first run keeps everything in the memory of each rank (stage 0). The second run partitions it over the ranks and keeps the
optimizer state on the drive (stage 3). Both must reach the same losses, norms and parameters, bit for bit; otherwise the exit
code is 1. ./quickstart calls it.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

RANKS = 2
MODEL = "--layers 4 --width 512 --heads 8 --context 256 --batch 4 --lr 1e-3 --max-norm 1 --steps 8".split()
ONE_STEP = "--layers 1 --width 64 --heads 1 --context 64 --batch 1 --steps 1".split()
CONFIGURATIONS = {"all in memory": ["--stage", "0"], "state on the drive": ["--stage", "3", "--state", "nvme"]}


class Run(NamedTuple):
    steps: list[dict]  # as the trainer writes them with --json
    exactly: str  # losses and norms with all their bits, and a hash of the final parameters


def gpu_options(program: Path, text: list[Path]) -> list[str]:
    """Return the options that train on GPU 0, or none if the trainer cannot use it. One step of a tiny model tells.

    A driver and a GPU are not enough: the program also has to be built with CUDA, for this kind of GPU.
    """
    command = [str(program), *ONE_STEP, "--stage", "0", "--gpu", "0", "--text", *map(str, text)]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode == 0:
        return ["--gpu", "0"]
    reason = (tried.stderr.strip() or f"the trainer ended with {tried.returncode}").splitlines()[0]
    print(f"Training on the CPU: {reason}\n", flush=True)
    return []


def train(program: Path, options: list[str], text: list[Path], drive: Path) -> Run:
    steps, losses = drive / "steps.jsonl", drive / "losses"
    files = ["--text", *map(str, text), "--drive", str(drive), "--json", str(steps), "--losses", str(losses)]
    command = [str(program), "--ranks", str(RANKS), *MODEL, *options, *files]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL)  # its errors go to the terminal
    if ended.returncode:
        raise SystemExit(f"two_places.py: the trainer ended with {ended.returncode}: {' '.join(command[:3] + options)} ...")
    return Run([json.loads(line) for line in steps.read_text().splitlines()], losses.read_text())


def row(name: str, cells: list[str]) -> str:
    return f"{name:<30}" + "".join(f"{cell:>22}" for cell in cells)


def mebibytes(run: Run, tier: str) -> str:
    count = run.steps[-1]["bytes"][tier]
    return f"{count / 2**20:.0f} MiB" if count else "-"


def table(runs: list[Run], device: str) -> str:
    lines = [row("", list(CONFIGURATIONS)), row("", ["(stage 0)", "(stage 3)"])]
    for steps in zip(*(run.steps for run in runs)):
        lines.append(row(f"loss of step {steps[0]['step']}", [f"{step['loss']:.6f}" for step in steps]))
    lines.append(row("tokens a second", [f"{median(s['tokens_per_second'] for s in run.steps[1:]):.0f}" for run in runs]))
    tiers = ((device, "device"), ("memory, host tier", "host"), ("drive", "nvme"))
    lines.append("a rank keeps")
    lines += [row(f"  {name}", [mebibytes(run, tier) for run in runs]) for name, tier in tiers]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="two_places.py", description=__doc__.split("\n")[0])
    parser.add_argument("program", type=Path, help="the trainer, gpt")
    parser.add_argument("text", type=Path, nargs="+", help="files to learn from")
    parser.add_argument("--directory", default=Path.cwd(), help="a directory on the drive that keeps the state (here)")
    options = parser.parse_args()
    gpu = gpu_options(options.program, options.text)
    runs = []
    for configuration in CONFIGURATIONS.values():
        with tempfile.TemporaryDirectory(prefix="ballast-two-places-", dir=options.directory) as drive:
            runs.append(train(options.program, configuration + gpu, options.text, Path(drive)))
    print(table(runs, "GPU memory" if gpu else "memory, device tier"))
    if len({run.exactly for run in runs}) > 1:
        print("\nTHE TWO RUNS DIFFER, but they must be equal bit for bit. Please report this.")
        return 1
    print(f"\nAll {len(runs[0].steps)} losses, all gradient norms and the final parameters are equal, bit for bit.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
