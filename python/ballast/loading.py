"""Load safetensors files straight into the memory where a model's parameters are kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def load(model: torch.nn.Module, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
    """Read parameters and buffers from safetensors files: a file, a pattern, a directory, an index, or several of them.

    No rank ever holds more than a piece of values that it does not keep. All ranks call this together, before or after
    `ballast.wrap()`. Names, shapes and formats must be those of the model: all are checked before anything changes.
    Parameters that were constructed in `ballast.deferred()`, or on torch's meta device, are read when training begins,
    so the files must stay until then.

    >>> import torch
    >>> load(torch.nn.Linear(2, 1), "nowhere/*.safetensors")
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 no file matches nowhere/*.safetensors
    ...
    """
    from ballast.wrapper.weight_loading import restore

    restore(model, files)
