"""Models in the files that others read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ballast.sizes import Size, parse_size

if TYPE_CHECKING:
    import torch


def export(model: torch.nn.Module, path: str | os.PathLike[str], *, max_shard_size: Size | None = None) -> None:
    """Writes parameters and buffers to a safetensors file, or to several with an index, as Hugging Face does.

    >>> import tempfile, torch, ballast
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(torch.nn.Linear(4, 1), f"{folder}/model.safetensors")
    ...     os.listdir(folder)
    ['model.safetensors']

    All ranks call this together, and the first of those that train the model writes: of each part, if ranks have different ones
    (`process_group`), which then need names of their own. No rank returns before the files are there. A model that is not of
    `ballast.wrap()` is written by the first of all ranks, and nobody waits. What is partitioned is gathered unit by unit: no
    rank ever has more than one of them. Files that are there are replaced when the new ones are whole; also those of an export
    under this name that took more files, or fewer. Parameters that several modules share are written once, under their first
    name, as `transformers` expects it.
    """
    from ballast.checkpoint.exporting import Export

    Export(model, Path(path), None if max_shard_size is None else parse_size(max_shard_size)).run()
