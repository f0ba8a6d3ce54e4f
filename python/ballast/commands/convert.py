"""`ballast convert`: make a checkpoint of Ballast from one of another program."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ballast.sizes import human_size

EXAMPLE = """\
examples:
  ballast convert output/checkpoint-500 checkpoints
  ballast convert of-deepspeed/global_step3 checkpoints --json
  ballast convert lightning_logs/version_0/checkpoints/last.ckpt checkpoints
"""


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    about = (
        "Make a checkpoint of Ballast from one of another program: of DeepSpeed (ZeRO stages 1 to 3, or universal), of\n"
        "torch.distributed.checkpoint (FSDP2, Accelerate, Lightning), or of torch.save(). It holds the masters in fp32, the\n"
        "moments and the steps, and any number of ranks resumes from it. Needs no GPU, no ranks and no model, and memory\n"
        "for a few tensors. ballast.load_checkpoint() reads the same checkpoints directly."
    )
    parser = commands.add_parser(
        "convert", help="make a checkpoint of Ballast from one of another program", description=about, epilog=EXAMPLE
    )
    parser.add_argument("source", help="the directory or the file of the other program")
    parser.add_argument("directory", help="the directory for the checkpoint, which must not hold one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print what was written."""
    from ballast.checkpoint.conversion import Conversion  # imports torch, which few commands need

    converted = Conversion(Path(chosen.source), Path(chosen.directory)).run()
    if chosen.json:
        print(json.dumps(asdict(converted), indent=2))
    else:
        state = f"{converted.trained:,} of them with {' and '.join(converted.moments)}"
        tensors = f"{converted.tensors:,} tensors, {state}"
        print(f"{chosen.directory}: step {converted.step}, {tensors}, {human_size(converted.bytes)}")
    return 0
