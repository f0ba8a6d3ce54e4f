"""`ballast plan`: does it fit, and at what speed?"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ballast.checks import refuse
from ballast.hardware import GPUS
from ballast.models.known import KNOWN
from ballast.plan_request import request_plan
from ballast.planning import best, unbeaten
from ballast.result import Plan
from ballast.sizes import human_size

EXAMPLE = """\
examples:
  ballast plan llama-70b --ranks 8 --gpu h100 --host-memory 2TiB --drives 30TB
  ballast plan path/to/config.json --ranks 2 --gpu rtx4090 --host-memory 128GiB --offload host --tokens 4096
  ballast plan llama-8b --ranks 1 --gpu rtx4090 --host-memory 128GiB --tokens 2048 --json
"""

WORDS = {
    "gpu": ("NAME", f"one of {', '.join(GPUS)}; a100 without it"),
    "gpu-memory": ("SIZE", "instead of that GPU's"),
    "host-memory": ("SIZE", "of a machine; without it nothing is kept on the host"),
    "drives": ("SIZE", "free space on a machine's drives; without it nothing is kept there"),
    "stage": ("N", "0, 1, 2, 3 or auto"),
    "offload": ("WHERE", "auto, none, host or nvme"),
    "reserve": ("SIZE", "of each GPU, for CUDA, NCCL and the allocator; 2GiB without it"),
    "activations": ("HOW", "checkpointed or kept, both estimated; or a size"),
    "optimizer": ("NAME", "adamw without it"),
    "format": ("NAME", "of the optimizer's state: fp32, split, bf16, compact"),
    "dtype": ("NAME", "of the parameters: bf16, fp16, fp32"),
}
COUNTS = {
    "ranks": "GPUs in all",
    "gpus-per-machine": "8 without it",
    "tokens": "of a GPU, in one micro-step; 8192 without it",
    "sequence": "tokens that see each other; 4096 without it",
    "micro-steps": "backward passes of one step",
}


def add_to(verbs: Any) -> None:
    """Makes this a verb of the command line."""
    about = "Says whether a model fits a machine, and at what speed it trains there. Needs no GPU."
    verb = verbs.add_parser("plan", help="does it fit, and at what speed?", description=about, epilog=EXAMPLE)
    verb.add_argument("model", help=f"config.json of a model, its folder, or one of {', '.join(KNOWN)}")
    for name, help in COUNTS.items():
        verb.add_argument(f"--{name}", type=int, metavar="N", help=help)
    for name, (kind, help) in WORDS.items():
        verb.add_argument(f"--{name}", metavar=kind, help=help)
    verb.add_argument("--efficiency", type=float, metavar="X", help="part of the GPU's peak that is reached; 0.5")
    verb.add_argument("--no-clipping", dest="clipping", action="store_false", default=None, help="update in backward")
    verb.add_argument("--resumable", action="store_true", default=None, help="what is on drives holds parameters too")
    verb.add_argument("--rate", dest="rates", action="append", metavar="NAME=RATE", help="read=3GB/s, and the like")
    verb.add_argument("--program", action="store_true", help="print the step as the engine runs it, and nothing else")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """The plan, and what more or less memory would do."""
    names = [*COUNTS, *WORDS, "efficiency", "clipping", "resumable"]
    given = {name.replace("-", "_"): getattr(asked, name.replace("-", "_")) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if asked.rates:
        given["rates"] = dict(_rate(word) for word in asked.rates)
    request = request_plan(asked.model, **given)
    plan = best(request)
    if asked.program:
        print(plan.program())
        return 0
    ways = unbeaten(request, also=plan)
    if asked.json:
        print(json.dumps({"plan": plan.to_dict(), "front": [way.to_dict() for way in ways]}, indent=2))
    else:
        print(plan.text())
        print("\n" + table(ways, plan))
    return 0


def _rate(word: str) -> tuple[str, str]:
    name, equals, rate = word.partition("=")
    if not equals:
        refuse(f"--rate {word} was given", needed="a name and a rate, such as read=3GB/s")
    return name, rate


def table(ways: list[Plan], plan: Plan) -> str:
    """What memory buys, a way in each line."""
    lines = ["what memory buys (fastest first; * is the plan above)"]
    lines.append(f"  {'GPU':>10}  {'host':>10}  {'drives':>10}  {'a step':>9}  {'tokens/s':>11}  how")
    for way in ways:
        sizes = "  ".join(f"{human_size(way.bytes_in(tier)) if way.bytes_in(tier) else '-':>10}" for tier in way.memory)
        mark = "*" if way is plan else " "
        lines.append(f"{mark} {sizes}  {way.seconds:>7.2f} s  {way.tokens_per_second:>11,.0f}  {way.where()}")
    return "\n".join(lines)
