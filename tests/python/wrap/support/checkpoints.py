"""Writes files with the safetensors package, as other programs do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import TensorSpec, serialize_file


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    full = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    entries = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in full.items()
    }
    serialize_file(entries, str(path), {"format": "pt"})


def save_in_parts(folder: Path, tensors: Mapping[str, torch.Tensor], parts: int) -> None:
    """Save the tensors in several files, with the index that Hugging Face writes."""
    names = list(tensors)
    where = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        mine = names[part::parts]
        save(folder / file, {name: tensors[name] for name in mine})
        where |= {name: file for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
