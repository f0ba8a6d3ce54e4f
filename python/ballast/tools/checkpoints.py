"""The commands on checkpoints: `ballast inspect`, `verify`, `export` and `convert`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.kinds import kind_of, run_at
from ballast.checkpoint.manifest import CUSTOM, ROLES, Checkpoint, parameters_of, problems_in, problems_of
from ballast.sizes import human_size, parse_size
from ballast.tools import Answer, add_command

OF_SAVE = "the directory of ballast.save()"
EXPORT_EXAMPLES = """\
export checkpoints exported
export checkpoints exported --dtype bf16 --max-shard-size 5GB --config path/to/config.json
export checkpoints of-torch --to distributed --json
"""
CONVERT_EXAMPLES = """\
convert output/checkpoint-500 checkpoints
convert of-deepspeed/global_step3 checkpoints --json
convert lightning_logs/version_0/checkpoints/last.ckpt checkpoints
"""
PUSH_EXAMPLES = "push checkpoints s3://bucket/run-7\npull s3://bucket/run-7 checkpoints"


def add_to(commands: Any) -> None:
    about = "Show what a checkpoint contains. Reads the manifest only; `ballast verify` reads all tensors."
    examples = "inspect checkpoints\ninspect checkpoints --tensors\ninspect checkpoints --json"
    parser = add_command(commands, inspect, "show the content of a checkpoint", about, examples)
    parser.add_argument("directory", help=f"{OF_SAVE} or of a run, or directory/NAME of several runs")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, as --json does")

    about = "Read all of a checkpoint, and list every piece that differs from its checksum. Exits with 1 if there is any."
    examples = "verify checkpoints\nverify checkpoints --json"
    parser = add_command(commands, verify, "check all bytes of a checkpoint", about, examples)
    parser.add_argument("directory", help=OF_SAVE)

    about = (
        "Write the weights of a checkpoint to safetensors files, as Hugging Face does. Reads checkpoints of Ballast, of\n"
        "torch.distributed.checkpoint and of DeepSpeed, and files of torch.save() and safetensors. Needs no GPU, no ranks\n"
        "and no model, and memory for a few tensors."
    )
    help = "write the weights of a checkpoint to safetensors files"
    parser = add_command(commands, export, help, about, EXPORT_EXAMPLES)
    parser.add_argument("checkpoint", help="the directory of a checkpoint")
    parser.add_argument("folder", help="the folder for the files; earlier safetensors files there are replaced")
    help = "safetensors (default), or distributed: for torch.distributed.checkpoint, with the optimizer's state of a training"
    parser.add_argument("--to", choices=("safetensors", "distributed"), default="safetensors", metavar="FORMAT", help=help)
    help = "fp32, bf16 or fp16: the format of the weights; default: as saved. In fp32 a training's masters are written"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), metavar="NAME", help=help)
    help = "size of the largest file, such as 5GB; default: one file"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=help)
    parser.add_argument("--config", metavar="FILE", help="copy this config.json, or that of this folder, to the weights")

    about = (
        "Make a checkpoint of Ballast from one of another program: of DeepSpeed (ZeRO stages 1 to 3, or universal), of\n"
        "torch.distributed.checkpoint (FSDP2, Accelerate, Lightning), or of torch.save(). It holds the masters in fp32, the\n"
        "moments and the steps, and any number of ranks resumes from it. Needs no GPU, no ranks and no model, and memory\n"
        "for a few tensors. ballast.load_checkpoint() reads the same checkpoints directly."
    )
    help = "make a checkpoint of Ballast from one of another program"
    parser = add_command(commands, convert, help, about, CONVERT_EXAMPLES)
    parser.add_argument("source", help="the directory or the file of the other program")
    parser.add_argument("directory", help="the directory for the checkpoint, which must not hold one")

    about = (
        "Put the current checkpoint of a directory to an address of fsspec, such as s3:// (with the package s3fs) or gs://\n"
        "(gcsfs). The manifest comes last, and replaces the checkpoint that was there."
    )
    parser = add_command(commands, push, "put a checkpoint to an object store", about, PUSH_EXAMPLES)
    parser.add_argument("directory", help=OF_SAVE)
    parser.add_argument("address", help="the address of a folder for this checkpoint alone")

    about = (
        "Get a checkpoint of `ballast push`, or the newest of those in folders right below the address. It becomes the\n"
        "current checkpoint of the directory when all of its bytes have their checksums."
    )
    parser = add_command(commands, pull, "get a checkpoint from an object store", about, PUSH_EXAMPLES)
    parser.add_argument("address", help="the address of `ballast push`, or of the folder above")
    parser.add_argument("directory", help="the directory for the checkpoint; another one there is replaced")


def inspect(chosen: argparse.Namespace) -> Answer:
    if kind_of(Path(chosen.directory)) == "run":
        return _inspect_run(chosen)
    place = manifest.LocalCheckpoint(Path(chosen.directory))
    text, checkpoint = place.current(lambda text: (text, place.parse(text)))
    if chosen.json:
        return Answer("", _content(text, checkpoint))
    lines = [*_summary(checkpoint), *([""] if chosen.tensors else [])]
    for name, tensor in checkpoint.tensors.items() if chosen.tensors else ():
        state = f", state in {tensor.kind.format.name}" if tensor.kind and tensor.kind.format else ""
        pieces = _counted(len(tensor.pieces), "piece")
        lines.append(f"{name}  {tensor.dtype} {tensor.shape}, {tensor.role}{state}, {pieces}")
    return Answer("\n".join(lines), None)


def _content(text: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the manifest, with the options of each group and the pieces of each tensor."""
    content: dict[str, Any] = json.loads(text)["content"]
    fields = ("first", "count", "file", "offset", "bytes")
    for group in (group for each in (content, *content["others"]) for group in each["groups"]):
        group["options"] = json.loads(group["options"])
    for name, tensor in checkpoint.tensors.items():
        content["tensors"][name]["pieces"] = [{field: getattr(piece, field) for field in fields} for piece in tensor.pieces]
    return content


def _commit_of(chosen: argparse.Namespace) -> _core.SavedCheckpoint:
    return _core.RecordedRun(*map(str, run_at(Path(chosen.directory)))).checkpoint()


def _inspect_run(chosen: argparse.Namespace) -> Answer:
    run = _commit_of(chosen)
    saved, tensors = run.optimizers[0], run.tensors
    elements = sum(each.elements for each in tensors.values())
    lines = [
        f"step        {saved.step}, the newest of a run on {_counted(run.ranks, 'rank')}",
        f"optimizer   {saved.optimizer}; moments: {', '.join(saved.moments.values()) or 'none'}",
        f"trained     {_counted(len(tensors), 'tensor')}, {_counted(elements, 'element')}",
        *(["", *(f"{name}  {each.shape}" for name, each in tensors.items())] if chosen.tensors else []),
    ]
    shapes = {name: each.shape for name, each in tensors.items()}
    return Answer("\n".join(lines), {"step": saved.step, "ranks": run.ranks, "rule": saved.optimizer, "tensors": shapes})


def _summary(checkpoint: Checkpoint) -> list[str]:
    made = f"written by Ballast {checkpoint.written_by} on {_counted(checkpoint.ranks, 'rank')}"
    if checkpoint.converted_from == manifest.IN_CPP:
        made = f"written by {manifest.IN_CPP} with Ballast {checkpoint.written_by} on {_counted(checkpoint.ranks, 'rank')}"
    elif checkpoint.converted_from:
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
    groups = [pair for saved, options in zip(checkpoint.optimizers, checkpoint.options) for pair in zip(saved.groups, options)]
    for number, (group, known) in enumerate(groups):
        options = ", ".join(f"{key}={known[key]}" for key in ("lr", "betas", "weight_decay") if key in known)
        lines.append(f"group {number:<6}{_counted(len(group.parameters), 'parameter')}: {options}")
    return lines


def _state_kept(saved: _core.SavedOptimizer, tensors: Mapping[str, _core.SavedTensor]) -> str:
    if not saved.own_step:
        return f"moments: {', '.join(saved.moments.values()) or 'none'}"
    own = set(parameters_of(saved))
    names = [name.rpartition(": ") for name, tensor in tensors.items() if tensor.role in CUSTOM]
    keys = {key for parameter, _, key in names if parameter in own}
    return f"state of its own step: {', '.join(sorted(keys)) or 'none'}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def verify(chosen: argparse.Namespace) -> Answer:
    is_run = kind_of(Path(chosen.directory)) == "run"
    run = Checkpoint(_commit_of(chosen), chosen.directory) if is_run else None
    problems = problems_of(chosen.directory) if run is None else [*problems_in(run)]
    what = "every byte" if run is None else "each record of the newest step"
    text = "\n".join(problems) or f"{chosen.directory} is intact: {what} has its checksum"
    return Answer(text, {"problems": problems}, code=1 if problems else 0)


def export(chosen: argparse.Namespace) -> Answer:
    from ballast.checkpoint.conversion import OfflineExport  # imports torch, which few commands need

    exported = OfflineExport(
        checkpoint=Path(chosen.checkpoint),
        folder=Path(chosen.folder),
        dtype=chosen.dtype,
        most_bytes=None if chosen.max_shard_size is None else parse_size(chosen.max_shard_size),
        to=chosen.to,
        config=None if chosen.config is None else Path(chosen.config),
    ).run()
    files = f"{len(exported.files)} files" if len(exported.files) > 1 else exported.files[0]
    text = f"{chosen.folder}: {files} with {exported.tensors:,} tensors, {human_size(exported.bytes)}"
    return Answer(text, asdict(exported))


def convert(chosen: argparse.Namespace) -> Answer:
    from ballast.checkpoint.conversion import Conversion  # imports torch, which few commands need

    converted = Conversion(Path(chosen.source), Path(chosen.directory)).run()
    state = f"{converted.trained:,} of them with {' and '.join(converted.moments)}"
    tensors = f"{converted.tensors:,} tensors, {state}"
    text = f"{chosen.directory}: step {converted.step}, {tensors}, {human_size(converted.bytes)}"
    return Answer(text, asdict(converted))


def push(chosen: argparse.Namespace) -> Answer:
    from ballast.checkpoint import remote  # imports torch, which few commands need

    return _moved(remote.push(Path(chosen.directory), chosen.address))


def pull(chosen: argparse.Namespace) -> Answer:
    from ballast.checkpoint import remote  # imports torch, which few commands need

    return _moved(remote.pull(chosen.address, Path(chosen.directory)))


def _moved(moved: Any) -> Answer:
    text = f"{moved.where}: step {moved.step}, {moved.files} files, {human_size(moved.bytes)}"
    return Answer(text, asdict(moved))
