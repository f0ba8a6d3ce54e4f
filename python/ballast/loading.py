"""Load weights straight into the memory where a model's parameters are kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def load(model: torch.nn.Module, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
    """Read parameters and buffers from a checkpoint of any kind, without an optimizer.

    `files` is a directory of `ballast.save()`, of `torch.distributed.checkpoint` (of a model alone, too) or of DeepSpeed; a
    file of `torch.save()`, or a folder or an index of such files; or safetensors: a file, a pattern, a directory, an index, or
    several of them.

    All ranks call this together, before or after `ballast.wrap()`. Of values that it does not keep, a rank never holds more
    than a piece, and in the checkpoint of a training no more than one tensor with its state. Names and shapes must be those
    of the model, and so must the formats in files with weights alone: all are checked before anything changes. Values saved by
    a training are rounded to the format of the model; a model in fp32 gets the masters. Universal checkpoints lack frozen
    parameters and buffers, which stay as they are.

    Parameters that were constructed in `ballast.deferred()`, or on torch's meta device, are read when training begins, so
    the files must stay until then.

    >>> import torch
    >>> load(torch.nn.Linear(2, 1), "nowhere/*.safetensors")
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 no file matches nowhere/*.safetensors
    ...
    """
    from ballast.checkpoint.weight_loading import restore

    restore(model, files)
