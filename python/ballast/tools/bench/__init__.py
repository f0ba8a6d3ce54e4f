"""`ballast bench`: measure memory and throughput on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ballast.checks import read_count, refuse
from ballast.new_files import output_path, write_output
from ballast.tools import Answer, add_command
from ballast.tools.bench.cases import select_cases

EXAMPLES = """\
bench
bench --quick --output this-machine.json --plot this-machine.svg
bench --ranks 4 --model path/to/config.json --only "stage 3" --only FSDP2
plan llama-8b --ranks 2 --measured this-machine.json
"""


def add_to(commands: Any) -> None:
    about = (
        "Measure memory and throughput on this machine: Ballast's stages and tiers, DDP, FSDP2, and DeepSpeed where it is "
        "installed. Each case trains in processes of its own. Takes minutes; with --quick less than one."
    )
    help = "measure memory and throughput on this machine"
    parser = add_command(commands, bench, help, about, EXAMPLES)
    parser.add_argument("--ranks", type=int, metavar="N", help="processes; default: one for each GPU, or 2 on a CPU")
    help = "train the model of a config.json, or one with a known name, scaled to fit; default: a small GPT"
    parser.add_argument("--model", metavar="MODEL", help=help)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="format of the parameters; default: bf16 on GPUs, else fp32")
    parser.add_argument("--quick", action="store_true", help="measure fewer cases, each for a shorter time")
    help = "measure only the cases with this word in their name, and those that they are compared with; can be repeated"
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help=help)
    help = "a directory on the drive to measure; default: the current one"
    parser.add_argument("--drive", type=Path, default=Path("."), metavar="DIRECTORY", help=help)
    parser.add_argument("--output", metavar="FILE.json", help="write all figures; ballast plan --measured reads them")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw memory against throughput")


def bench(chosen: argparse.Namespace) -> Answer:
    """Measure, and print a table. Return 1 where a case of Ballast failed."""
    output = output_path("--output", chosen.output, ".json") if chosen.output is not None else None
    plot = output_path("--plot", chosen.plot, ".svg") if chosen.plot is not None else None
    if not chosen.drive.is_dir() or not os.access(chosen.drive, os.W_OK):
        refuse(f"cannot measure the drive of {chosen.drive}", needed="a directory that this process may write to")
    ranks = None if chosen.ranks is None else read_count("ranks", chosen.ranks)
    try:
        from ballast.tools.bench.run import measure, scaled_setting, setting_for
    except ImportError as problem:
        refuse(f"cannot measure: {problem}", needed="torch", remedy="pip install torch")
    setting = setting_for(ranks=ranks, dtype=chosen.dtype, quick=chosen.quick, directory=chosen.drive.absolute())
    if chosen.model is not None:
        setting = scaled_setting(setting, chosen.model, quick=chosen.quick)
    selected = select_cases(on_gpu=setting.on_gpu, quick=chosen.quick, only=chosen.only)

    def show_progress(case: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{case}", end="", file=sys.stderr, flush=True)

    report = measure(setting, selected, report_progress=show_progress)
    if output:
        write_output(output, json.dumps(report.to_dict(), indent=2) + "\n")
    if plot:
        write_output(plot, report.drawing().svg(alone=True))
    has_failed = any(row.failure and row.is_ballast for row in report.rows)
    return Answer(report.table(), report.to_dict(), code=int(has_failed))
