"""`ballast inspect`: show the content of a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ballast.checkpoint import manifest
from ballast.checkpoint.contents import CUSTOM, ROLES, Checkpoint, SavedOptimizer, Tensor
from ballast.sizes import human_size

EXAMPLE = """\
examples:
  ballast inspect checkpoints
  ballast inspect checkpoints --tensors
  ballast inspect checkpoints --json
"""


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    about = "Show what a checkpoint contains. Reads the manifest only; `ballast verify` reads all tensors."
    parser = commands.add_parser("inspect", help="show the content of a checkpoint", description=about, epilog=EXAMPLE)
    parser.add_argument("directory", help="the directory of ballast.save()")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print a summary, or everything."""
    checkpoint = manifest.read(chosen.directory)
    if chosen.json:
        content = {**asdict(checkpoint), **checkpoint.to_json(), "tensors": asdict(checkpoint)["tensors"]}
        del content["optimizers"]
        print(json.dumps(content, indent=2))
        return 0
    print("\n".join(_summary(checkpoint)))
    if chosen.tensors:
        print()
        for name, tensor in checkpoint.tensors.items():
            print(_line(name, tensor))
    return 0


def _summary(checkpoint: Checkpoint) -> list[str]:
    made = f"written by Ballast {checkpoint.written_by} on {_counted(checkpoint.ranks, 'rank')}"
    if checkpoint.converted_from:
        made = f"converted by Ballast {checkpoint.written_by} from {checkpoint.converted_from}"
    lines = [
        f"step        {checkpoint.step}, {made}",
        *(f"optimizer   {saved.optimizer}; {_state_kept(saved, checkpoint.tensors)}" for saved in checkpoint.optimizers),
    ]
    for role in ROLES:
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.role == role]
        if tensors:
            elements = sum(tensor.elements for tensor in tensors)
            size = human_size(sum(piece.bytes for tensor in tensors for piece in tensor.pieces))
            lines.append(f"{role:<12}{_counted(len(tensors), 'tensor')}, {_counted(elements, 'element')}, {size}")
    for number, group in enumerate(group for saved in checkpoint.optimizers for group in saved.groups):
        known = group["options"]
        options = ", ".join(f"{key}={known[key]}" for key in ("lr", "betas", "weight_decay") if key in known)
        lines.append(f"group {number:<6}{_counted(len(group['parameters']), 'parameter')}: {options}")
    return lines


def _state_kept(saved: SavedOptimizer, tensors: Mapping[str, Tensor]) -> str:
    if not saved.own_step:
        return f"moments: {', '.join(saved.moments.values()) or 'none'}"
    own = set(saved.parameters)
    names = [name.rpartition(": ") for name, tensor in tensors.items() if tensor.role in CUSTOM]
    keys = {key for parameter, _, key in names if parameter in own}
    return f"state of its own step: {', '.join(sorted(keys)) or 'none'}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _line(name: str, tensor: Tensor) -> str:
    state = f", state in {tensor.format}" if tensor.format else ""
    return f"{name}  {tensor.dtype} {tensor.shape}, {tensor.role}{state}, {_counted(len(tensor.pieces), 'piece')}"
