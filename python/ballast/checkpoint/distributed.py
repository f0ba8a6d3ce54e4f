"""Read directories of torch.distributed.checkpoint that hold the state_dicts of its get_state_dict(), under any keys."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ballast.checkpoint.dcp_metadata import EXTRA, SMALL, Chunk, Entry, Place, read_metadata
from ballast.checkpoint.keyed import OF_OPTIMIZERS, Content
from ballast.checkpoint.kinds import parts_of_distributed
from ballast.checkpoint.source import Latest, WholeTensor
from ballast.checkpoint.torch_file import ANY
from ballast.checkpoint.unpickling import fail_file, fail_unreadable, load_without_code, require_plain
from ballast.torch.parameters.stored_tensors import StoredTensor


def content_of(directory: Path) -> Content:
    """Return the tensors of a directory, or of those in it that together are a checkpoint of Accelerate."""
    tensors: dict[str, StoredTensor] = {}
    paths: dict[str, tuple[str, ...]] = {}
    objects: dict[str, Place] = {}
    latest: dict[str, Latest] = defaultdict(Latest)  # of the model's tensors, and of those with the name of each moment
    for part in parts_of_distributed(directory):
        metadata = read_metadata(part)
        around = () if part == directory else (part.name,)
        for key, entry in metadata.entries.items():
            whole = ".".join((*around, key))
            kept = latest[key.rpartition(".")[2] if OF_OPTIMIZERS.intersection(key.split(".")) else ""]
            tensors[whole] = WholeTensor(partial(read_entry, entry), entry.dtype, entry.shape, part, kept)
            if key in metadata.paths or around:
                paths[whole] = (*around, *metadata.paths.get(key, (key,)))
        objects |= {".".join((*around, key)): place for key, place in metadata.objects.items()}
        paths |= {".".join((*around, key)): (*around, *metadata.paths.get(key, (key,))) for key in metadata.objects}
    readers: dict[str, Callable[[], Any]] = {key: partial(_read_object, *place) for key, place in objects.items()}
    readers.update((key, each.read_all) for key, each in tensors.items() if not SMALL.isdisjoint(key.split(".")))
    groups = {key.partition("param_groups.")[0] for key in objects if "param_groups." in key}
    named_groups = {prefix: partial(_groups_of, readers, f"{prefix}param_groups.") for prefix in groups}
    return Content(directory, tensors, paths, named_groups=named_groups, extra=partial(_extra_of, readers, paths))


def _groups_of(readers: Mapping[str, Callable[[], Any]], around: str) -> list[dict[str, Any]]:
    """Return the parameter groups of get_state_dict(): each has a number, or each option has the name of a parameter."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, read in readers.items():
        if key.startswith(around):
            holder, _, option = key.removeprefix(around).rpartition(".")
            found[holder][option] = read()
    return [{"params": [holder], **options} for holder, options in found.items()]


def _extra_of(readers: Mapping[str, Callable[[], Any]], paths: Mapping[str, tuple[str, ...]]) -> Any:
    """Return the entry `extra`, whose dictionaries torch has taken apart."""
    if EXTRA in readers:
        return readers[EXTRA]()
    found: dict[str, Any] = {}
    for key, read in readers.items():
        first, *words = paths.get(key, (key,))
        holder: Any = found
        for word in words[:-1] if first == EXTRA else ():
            holder = holder.setdefault(word, {}) if isinstance(holder, dict) else None
        if first == EXTRA and words and isinstance(holder, dict):
            holder[words[-1]] = read()
    return found or None


def _read_object(path: Path, begin: int, count: int) -> Any:
    return load_without_code(io.BytesIO(_read_bytes(path, begin, count)), path, ANY)


def read_entry(entry: Entry) -> torch.Tensor:
    """Return a tensor, read chunk by chunk."""
    if len(entry.chunks) == 1:
        return _read_chunk(entry, entry.chunks[0])
    values = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    for chunk in entry.chunks:
        place = values[tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes))]
        place.copy_(_read_chunk(entry, chunk))
    return values


def _read_chunk(entry: Entry, chunk: Chunk) -> torch.Tensor:
    content = _read_bytes(chunk.path, chunk.begin, chunk.bytes)
    values = require_plain(load_without_code(io.BytesIO(content), chunk.path), chunk.path)
    if values.dtype != entry.dtype or tuple(values.shape) != chunk.sizes:
        fail_unreadable(chunk.path, f"it holds a tensor of {values.dtype} and {tuple(values.shape)} at {chunk.begin}")
    return values


def _read_bytes(path: Path, begin: int, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(count)
    except OSError as error:
        fail_file(path, error)
