"""Read directories of torch.distributed.checkpoint that hold the state_dicts of its get_state_dict(), under any keys."""

from __future__ import annotations

import io
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch

from ballast.checkpoint.dcp_metadata import Chunk, Entry, read_metadata
from ballast.checkpoint.keyed import OF_OPTIMIZERS, Content
from ballast.checkpoint.kinds import parts_of_distributed
from ballast.checkpoint.source import Latest, WholeTensor
from ballast.checkpoint.unpickling import fail_file, fail_unreadable, load_without_code, require_plain
from ballast.wrapper.stored_tensor import StoredTensor


def content_of(directory: Path) -> Content:
    """Return the tensors of a directory, or of those in it that together are a checkpoint of Accelerate."""
    tensors: dict[str, StoredTensor] = {}
    paths: dict[str, tuple[str, ...]] = {}
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
    return Content(directory, tensors, paths)


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
    try:
        with open(chunk.path, "rb") as file:
            file.seek(chunk.begin)
            content = file.read(chunk.bytes)
    except OSError as error:
        fail_file(chunk.path, error)
    values = require_plain(load_without_code(io.BytesIO(content), chunk.path), chunk.path)
    if values.dtype != entry.dtype or tuple(values.shape) != chunk.sizes:
        fail_unreadable(chunk.path, f"it holds a tensor of {values.dtype} and {tuple(values.shape)} at {chunk.begin}")
    return values
