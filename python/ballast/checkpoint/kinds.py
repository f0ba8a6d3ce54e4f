"""Recognise what a directory holds by the names of its files. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from ballast.checks import refuse

MANIFEST = "checkpoint.json"
RUN_FOLDER = re.compile(r"(.+)-rank-\d+")  # of wrap(run=...)
RECORDS = "state*.records"  # in it
HOST_FOLDER = re.compile(r"host-(\d+)")  # of wrap(outer=...)

# What others write, and what reads it here.
FOREIGN = {
    "distributed": "a directory of torch.distributed.checkpoint",
    "universal": "a universal checkpoint of DeepSpeed",
    "deepspeed": "a checkpoint of DeepSpeed, sharded for the ranks that wrote it",
    "safetensors": "safetensors files",
}
READERS = {
    "distributed": "ballast.load_checkpoint() and ballast.load() read it, and `ballast export` writes its parameters to "
    "safetensors files.",
    "deepspeed": "DeepSpeed's ds_to_universal makes it universal; load_checkpoint() shows the command.",
    "safetensors": "ballast.load() reads them.",
}
READERS["universal"] = READERS["distributed"]


def kind_of(directory: Path) -> str:
    """Return the kind of checkpoint: "universal" and "deepspeed" are DeepSpeed's, "distributed" is torch's. An empty
    string means unknown."""
    found = {
        "ballast": directory / MANIFEST,
        "universal": directory / "zero",
        "distributed": directory / ".metadata",
        "deepspeed": directory / "latest_universal",
    }
    for kind, path in found.items():
        if path.exists():
            return kind
    patterns = {"deepspeed": "*_states.pt", "safetensors": "*.safetensors"}
    for kind, pattern in patterns.items():
        if any(directory.glob(pattern)) or any(directory.glob(f"*/{pattern}")):
            return kind
    return ""


def runs_in(directory: Path) -> list[str]:
    """Return the names of the runs whose state is in this directory; offload/FORMAT.md describes it."""
    found = [RUN_FOLDER.fullmatch(path.parent.name) for path in directory.glob(f"*-rank-*/{RECORDS}")]
    return sorted({match[1] for match in found if match})


def refuse_without_checkpoint(directory: Path) -> NoReturn:
    """Raise B1001 for a directory without a checkpoint of Ballast, and say what it is."""
    available, remedy = _described(directory)
    refuse(
        f"cannot load a checkpoint: there is none in {directory}",
        needed=f"a directory of ballast.save(), which holds a {MANIFEST}",
        available=available,
        remedy=remedy,
    )


def _described(directory: Path) -> tuple[str, str]:
    """Return what there is instead, and what to do."""
    if not directory.exists():
        return "", "Check the path: there is no such directory."
    if not directory.is_dir():
        remedy = f"Name its directory: {directory.parent}" if directory.name == MANIFEST else READERS["safetensors"]
        is_known = directory.name == MANIFEST or directory.suffix == ".safetensors"
        return "a file, which is no directory", remedy if is_known else ""
    own = RUN_FOLDER.fullmatch(directory.absolute().name) if any(directory.glob(RECORDS)) else None
    of_runs = directory.absolute().parent if own else directory
    runs = [own[1]] if own else runs_in(directory)
    if runs:
        remedy = f'The run resumes with wrap(..., offload="nvme:{of_runs}", run="{runs[0]}").'
        return f"a run: {', '.join(runs)}", remedy
    if below := [path.parent.name for path in sorted(directory.glob(f"*/{MANIFEST}"))]:
        of_hosts = " Or load them all in a training with wrap(outer=...)." if HOST_FOLDER.fullmatch(below[0]) else ""
        remedy = f"Name one of them, such as {directory / below[0]}.{of_hosts}"
        return f"checkpoints in folders of it: {', '.join(below[:5])}", remedy
    kind = kind_of(directory)
    return FOREIGN.get(kind, ""), READERS.get(kind, "")
