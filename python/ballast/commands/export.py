"""`ballast export`: write the weights of a checkpoint to safetensors files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ballast.sizes import human_size, parse_size

EXAMPLE = """\
examples:
  ballast export checkpoints exported
  ballast export checkpoints exported --dtype bf16 --max-shard-size 5GB --config path/to/config.json
  ballast export checkpoints of-torch --to distributed --json
"""


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    about = (
        "Write the weights of a checkpoint to safetensors files, as Hugging Face does. Reads checkpoints of Ballast, of\n"
        "torch.distributed.checkpoint and of DeepSpeed, and files of torch.save() and safetensors. Needs no GPU, no ranks\n"
        "and no model, and memory for a few tensors."
    )
    parser = commands.add_parser(
        "export", help="write the weights of a checkpoint to safetensors files", description=about, epilog=EXAMPLE
    )
    parser.add_argument("checkpoint", help="the directory of a checkpoint")
    parser.add_argument("folder", help="the folder for the files; earlier safetensors files there are replaced")
    help = "safetensors (default), or distributed: for torch.distributed.checkpoint, with the optimizer's state of a training"
    parser.add_argument("--to", choices=("safetensors", "distributed"), default="safetensors", metavar="FORMAT", help=help)
    help = "fp32, bf16 or fp16: the format of the weights; default: as saved. In fp32 a training's masters are written"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), metavar="NAME", help=help)
    help = "size of the largest file, such as 5GB; default: one file"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=help)
    parser.add_argument("--config", metavar="FILE", help="copy this config.json, or that of this folder, to the weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print what was written."""
    from ballast.checkpoint.offline_export import OfflineExport  # imports torch, which no other command needs

    exported = OfflineExport(
        checkpoint=Path(chosen.checkpoint),
        folder=Path(chosen.folder),
        dtype=chosen.dtype,
        most_bytes=None if chosen.max_shard_size is None else parse_size(chosen.max_shard_size),
        to=chosen.to,
        config=None if chosen.config is None else Path(chosen.config),
    ).run()
    if chosen.json:
        print(json.dumps(asdict(exported), indent=2))
    else:
        files = f"{len(exported.files)} files" if len(exported.files) > 1 else exported.files[0]
        print(f"{chosen.folder}: {files} with {exported.tensors:,} tensors, {human_size(exported.bytes)}")
    return 0
