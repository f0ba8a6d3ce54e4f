"""Construct models without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Make large tensors inside the `with` block without memory: they are on torch's meta device, and their
    initialization is recorded. `ballast.wrap(optimizer, model)` makes the parameters piece by piece, with the same bits
    as without this block, or `ballast.load()` reads them.

    >>> import torch
    >>> with deferred():
    ...     layer = torch.nn.Linear(1000, 1000)
    >>> layer.weight.device
    device(type='meta')

    Cast the model, or move it to a GPU, inside the block: `model.to(torch.bfloat16)`.
    """
    from ballast.wrapper.deferred_init import FutureDevice, Recorder

    with Recorder(), FutureDevice():
        yield
