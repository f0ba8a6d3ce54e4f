"""Compare the losses of hosts that exchange parameters every few steps with those of plain data parallelism, over a slow link.

Each training that ends is added to a file, and a training in the file is not repeated. A line's value is the loss at the end,
the time of the steps, or the bytes that a host's link has sent, by the kernel's own counter; all vs. DDP."""

import os
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import suite
from contest import append
from network import Link, Network, Site, megabytes, run_ranks

RANK = Path(__file__).with_name("loss_rank.py")
SITE = Site(2, 1, Link(0.1))
CONTEXT = 64  # bytes of a sequence


class Scheme(NamedTuple):
    """How hosts combine what they have learned: gradients in each step, or parameters every few steps."""

    name: str
    every: int | None = None
    wire: str = "exact"


class Size(NamedTuple):
    """A GPT of examples/gpt.py, and its training. The learning rate rises to the highest, and falls."""

    name: str
    layers: int
    width: int
    sequences: int  # sequences of a step, of both hosts together
    learning_rate: float
    steps: int  # the number, unless the command says otherwise
    held_out: int  # sequences that a point of the curve is the mean loss of


DDP = Scheme("DDP")
SCHEMES = (
    DDP,
    Scheme("DiLoCo, every 16", 16),
    Scheme("DiLoCo, every 64", 64),
    Scheme("DiLoCo, every 64, int8", 64, "int8"),
    Scheme("DiLoCo, every 64, int4", 64, "int4"),
)
SIZES = (
    Size("3M", layers=4, width=256, sequences=4, learning_rate=1e-3, steps=640, held_out=128),
    Size("30M", layers=6, width=640, sequences=2, learning_rate=5e-4, steps=128, held_out=32),
)


class LossCase(NamedTuple):
    size: Size
    scheme: Scheme
    seed: int = 0  # the seed of the first values and of the order of the text

    @property
    def name(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""
        return f"losses, {SITE.name}, {self.size.name}: {self.scheme.name}{seed}"

    def setting(self, steps: int) -> str:
        """Return in words what decides the losses, besides the scheme and the text."""
        size = self.size
        batches = f"{size.sequences} sequences of {CONTEXT} bytes a step"
        return f"{size.layers} layers of width {size.width}, fp32, {steps} steps, {batches}, AdamW at {size.learning_rate:g}"

    def key(self, steps: int) -> tuple[str, str]:
        return self.name, self.setting(steps)


SEEDS = 3  # the highest number of seeds of a case
CASES = [LossCase(size, scheme, seed) for seed in range(SEEDS) for size in SIZES for scheme in SCHEMES]


def read(path: Path) -> dict[tuple[str, str], dict]:
    """Return the finished trainings of a file, by case and setting."""
    return {(row["case"], row["setting"]): row for row in suite.read_rows(path)}


def row_of(case: LossCase, steps: int, ranks: Sequence[dict]) -> dict:
    """Return a training as a line of the file, from what its ranks have printed. A point of the curve has the mean loss of
    the hosts, the time of the slowest, and the bytes of the busiest link."""
    curve = []
    for points in zip(*(rank["curve"] for rank in ranks), strict=True):
        at, losses, seconds, sent = zip(*points, strict=True)
        curve.append([at[0], statistics.fmean(losses), max(seconds), max(sent)])
    return {
        "case": case.name,
        "setting": case.setting(steps),
        "seed": case.seed,
        "curve": curve,
        "figures": ranks[0]["figures"],
        "text": ranks[0]["text"],
        "machine": suite.machine_name(),
        "load": os.getloadavg()[1],  # other processes on the machine, which take time from the ranks
        "command": f"./run-benchmarks hosts -- --losses --only '{case.name}' --steps {steps} --seeds {case.seed + 1}",
    }


def records(row: dict, ddp: dict | None) -> list[dict]:
    """Return the lines of a training; a ratio above 1 is better in all of them."""
    name, (_, loss, seconds, sent) = f"{row['case']}, {row['curve'][-1][0]} steps", row["curve"][-1]
    mine = [("", loss, "loss"), (", time", seconds, "s"), (", sent", megabytes(sent), "MB")]
    if ddp is None or ddp is row:
        return [suite.line(name + what, value, unit) for what, value, unit in mine]
    theirs = [*ddp["curve"][-1][1:3], megabytes(ddp["curve"][-1][3])]
    return [
        suite.versus(name + what, DDP.name, unit, [value], [other])
        for (what, value, unit), other in zip(mine, theirs, strict=True)
    ]


def train(case: LossCase, steps: int, network: Network) -> dict:
    with tempfile.TemporaryDirectory(prefix="ballast-losses-") as folder:
        return row_of(case, steps, run_ranks(SITE, network, [str(RANK), case.name, str(steps)], Path(folder)))


def compare(options: Namespace) -> None:
    """Make the trainings that the file lacks, and print the lines of all that were requested."""
    finished = read(options.runs)
    wanted = [(case, options.steps or case.size.steps) for case in options.cases if case.seed < options.seeds]
    with Network(SITE.hosts, SITE.link) as network:
        for case, steps in wanted:
            if case.key(steps) in finished:
                continue
            print(f"hosts: {case.name}, {steps} steps", file=sys.stderr, flush=True)
            row = train(case, steps, network) | {"commit": suite.commit()}
            finished[case.key(steps)] = row
            append(options.runs, row)
    for case, steps in wanted:
        suite.emit("hosts", records(finished[case.key(steps)], finished.get(case._replace(scheme=DDP).key(steps))))
