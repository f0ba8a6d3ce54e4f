"""Recognise what a directory holds by the names of its files. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from ballast import _core
from ballast.checks import refuse

MANIFEST = "checkpoint.json"
RUN_FOLDER = re.compile(r"(.+)-rank-\d+")  # a folder of wrap(run=...)
RECORDS = "state*.records"  # files in such a folder
HOST_FOLDER = re.compile(r"host-(\d+)")  # a folder of wrap(outer=...)

PART_OF_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")  # folders of torch.distributed.checkpoint

# Files of torch.save() in a folder: weights, an index of several, and the optimizer's state next to them.
TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_WEIGHTS = re.compile(r"(pytorch_model(_fsdp)?|model|pytorch_model-\d+-of-\d+)\.bin")
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")

# What others write, and what reads it here.
FOREIGN = {
    "distributed": "a directory of torch.distributed.checkpoint",
    "universal": "a universal checkpoint of DeepSpeed",
    "deepspeed": "a checkpoint of DeepSpeed",
    "torch": "files of torch.save()",
    "safetensors": "safetensors files",
}
READERS = {
    "distributed": "ballast.load_checkpoint() and ballast.load() read it, `ballast convert` makes a checkpoint of Ballast from "
    "it, and `ballast export` writes its parameters to safetensors files.",
    "safetensors": "ballast.load() reads them.",
}
READERS |= dict.fromkeys(("universal", "deepspeed", "torch"), READERS["distributed"])


def kind_of(path: Path) -> str:
    """Return the kind of checkpoint: "universal" and "deepspeed" are DeepSpeed's, "distributed" is torch's, and "torch" is what
    torch.save() writes. An empty string means unknown."""
    if path.is_file():
        is_index = path.name.endswith(".bin.index.json")
        return "torch" if is_index or path.suffix in TORCH_SUFFIXES else ""
    found = {
        "ballast": path / MANIFEST,
        "universal": path / "zero",
        "distributed": path / ".metadata",
        "deepspeed": path / "latest_universal",
    }
    for kind, file in found.items():
        if file.exists():
            return kind
    if parts_of_distributed(path) != [path]:
        return "distributed"
    if any(path.glob("*_states.pt")) or any(path.glob("*/*_states.pt")):
        return "deepspeed"
    weights, optimizer = torch_files_in(path)
    if weights or optimizer is not None:
        return "torch"
    if any(path.glob("*.safetensors")):
        return "safetensors"
    if _core.runs_in(str(path)) or _is_run_name(path):
        return "run"
    is_safetensors = any(path.glob("*/*.safetensors"))
    return "safetensors" if is_safetensors else ""


def _is_run_name(path: Path) -> bool:
    return not path.exists() and path.name in _core.runs_in(str(path.parent))


def run_at(path: Path) -> tuple[Path, str]:
    """Return the directory and the name of the run that a path names: the only one in a directory, or one of several as in
    directory/name."""
    if _is_run_name(path):
        return path.parent, path.name
    runs = _core.runs_in(str(path))
    if len(runs) != 1:
        refuse(
            f"cannot read a run: {path} has {len(runs)}",
            needed="the directory of one run, or the directory and a name, such as " + str(path / (runs or ["NAME"])[0]),
            available=", ".join(runs),
        )
    return path, runs[0]


def parts_of_distributed(directory: Path) -> list[Path]:
    """Return the directories of torch.distributed.checkpoint that together are one checkpoint: those of Accelerate's model and
    optimizer, or the directory itself."""
    if (directory / ".metadata").exists():
        return [directory]
    parts = [path.parent for path in directory.glob("*/.metadata") if PART_OF_ACCELERATE.fullmatch(path.parent.name)]
    return sorted(parts) or [directory]


def torch_files_in(directory: Path) -> tuple[list[Path], Path | None]:
    """Return the files of torch.save() in a directory: the weights, or their index, and the optimizer's state. Weights that are
    there as safetensors too are read from those."""
    index = directory / TORCH_INDEX
    named = sorted(path for path in directory.glob("*.bin") if TORCH_WEIGHTS.fullmatch(path.name))
    optimizer = next((path for name in OPTIMIZER_FILES if (path := directory / name).is_file()), None)
    weights = [] if any(directory.glob("*.safetensors")) else [index] if index.is_file() else named
    return weights, optimizer


def refuse_without_checkpoint(
    directory: Path,
    what: str = "cannot load a checkpoint",
    needed: str = f"a directory of ballast.save(), which holds a {MANIFEST}",
) -> NoReturn:
    """Raise B1001 for a directory without a checkpoint, and say what it is."""
    available, remedy = _described(directory)
    refuse(f"{what}: there is none in {directory}", needed=needed, available=available, remedy=remedy)


def _described(directory: Path) -> tuple[str, str]:
    """Return what there is instead, and what to do."""
    if not directory.exists():
        return "", "Check the path: there is no such directory."
    if not directory.is_dir():
        remedy = f"Name its directory: {directory.parent}" if directory.name == MANIFEST else READERS["safetensors"]
        is_known = directory.name == MANIFEST or directory.suffix == ".safetensors"
        if kind_of(directory) == "torch":
            return "a file of torch.save()", READERS["torch"]
        return "a file, which is no directory", remedy if is_known else ""
    own = RUN_FOLDER.fullmatch(directory.absolute().name) if any(directory.glob(RECORDS)) else None
    run_directory = directory.absolute().parent if own else directory
    if runs := [own[1]] if own else _core.runs_in(str(directory)):  # offload/FORMAT.md describes them
        remedy = f'The run resumes with wrap(..., offload="nvme:{run_directory}", run="{runs[0]}").'
        return f"a run: {', '.join(runs)}", remedy
    if below := [path.parent.name for path in sorted(directory.glob(f"*/{MANIFEST}"))]:
        in_training = " Or load them all in a training with wrap(outer=...)." if HOST_FOLDER.fullmatch(below[0]) else ""
        remedy = f"Name one of them, such as {directory / below[0]}.{in_training}"
        return f"checkpoints in folders of it: {', '.join(below[:5])}", remedy
    kind = kind_of(directory)
    files = sorted(path.name for path in directory.iterdir() if path.suffix in TORCH_SUFFIXES)
    if files and not kind:
        return f"files of torch.save(): {', '.join(files[:5])}", f"Name one of them, such as {directory / files[0]}."
    return FOREIGN.get(kind, ""), READERS.get(kind, "")
