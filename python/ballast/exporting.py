"""Export models to files that other programs read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ballast.sizes import Size, parse_size

if TYPE_CHECKING:
    import torch


def export(model: torch.nn.Module, path: str | os.PathLike[str], *, max_shard_size: Size | None = None) -> None:
    """Write parameters and buffers to a safetensors file, or to several with an index, as Hugging Face does.

    >>> import tempfile, torch, ballast
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(torch.nn.Linear(4, 1), f"{folder}/model.safetensors")
    ...     os.listdir(folder)
    ['model.safetensors']

    All ranks call this together, and return when the files are complete. The first rank that trains the model writes
    them. If ranks train different parts of a model (`process_group`), each part needs a file name of its own. Rank 0
    writes a model that is not wrapped, and no rank waits for it. Sharded parameters are gathered unit by unit, so no
    rank holds more than one unit.

    Existing files are replaced when the new ones are complete, including those of an earlier export under this name
    with another number of files. Parameters that several modules share are written once, under their first name, as
    `transformers` expects. `max_shard_size` is the size of the largest file, such as "5GB".
    """
    from ballast.checkpoint.exporting import Export

    Export(model, Path(path), None if max_shard_size is None else parse_size(max_shard_size)).run()
