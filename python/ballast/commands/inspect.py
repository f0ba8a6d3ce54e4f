"""`ballast inspect`: what is in a checkpoint?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ballast.checkpoint import manifest
from ballast.checkpoint.manifest import OWN, ROLES, Checkpoint, Tensor
from ballast.sizes import human_size

EXAMPLE = """\
examples:
  ballast inspect checkpoints
  ballast inspect checkpoints --tensors
  ballast inspect checkpoints --json
"""


def add_to(verbs: Any) -> None:
    """Makes this a verb of the command line."""
    about = "Says what a checkpoint holds. Reads none of its numbers: `ballast verify` does."
    verb = verbs.add_parser("inspect", help="what is in a checkpoint?", description=about, epilog=EXAMPLE)
    verb.add_argument("directory", help="that ballast.save() was given")
    verb.add_argument("--tensors", action="store_true", help="a line for each of them")
    verb.add_argument("--json", action="store_true", help="for programs; with all tensors")
    verb.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """A summary, or everything."""
    checkpoint = manifest.read(asked.directory)
    if asked.json:
        print(json.dumps(asdict(checkpoint), indent=2))
        return 0
    print("\n".join(_summary(checkpoint)))
    if asked.tensors:
        print()
        for name, tensor in checkpoint.tensors.items():
            print(_line(name, tensor))
    return 0


def _summary(checkpoint: Checkpoint) -> list[str]:
    lines = [
        f"step        {checkpoint.step}, written by Ballast {checkpoint.written_by} on {checkpoint.ranks} ranks",
        f"optimizer   {checkpoint.optimizer}, {_kept(checkpoint)}",
    ]
    for role in ROLES:
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.role == role]
        if tensors:
            elements = sum(tensor.elements for tensor in tensors)
            size = human_size(sum(piece.bytes for tensor in tensors for piece in tensor.pieces))
            lines.append(f"{role:<12}{len(tensors)} tensors, {elements:,} elements, {size}")
    for number, group in enumerate(checkpoint.groups):
        known = group["options"]
        options = ", ".join(f"{key}={known[key]}" for key in ("lr", "betas", "weight_decay") if key in known)
        lines.append(f"group {number:<6}{len(group['parameters'])} parameters: {options}")
    return lines


def _kept(checkpoint: Checkpoint) -> str:
    if not checkpoint.own_step:
        return f"which keeps {', '.join(checkpoint.moments.values()) or 'no moments'}"
    keys = {name.rpartition(": ")[2] for name, tensor in checkpoint.tensors.items() if tensor.role in OWN}
    return f"whose own step keeps {', '.join(sorted(keys)) or 'nothing'}"


def _line(name: str, tensor: Tensor) -> str:
    state = f", state in {tensor.format}" if tensor.format else ""
    return f"{name}  {tensor.dtype} {tensor.shape}, {tensor.role}{state}, {len(tensor.pieces)} pieces"
