"""Models that are constructed without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Large tensors that are made inside of the `with` block have no memory: they are on torch's meta device, and how they are
    initialised is remembered. `ballast.wrap(optimizer, model)` makes parameters piece by piece, with the bits that they
    would have had, or `ballast.load()` reads them.

    >>> import torch
    >>> with deferred():
    ...     layer = torch.nn.Linear(1000, 1000)
    >>> layer.weight.device
    device(type='meta')

    Casts, and moves to a GPU, belong into the block: `model.to(torch.bfloat16)`.
    """
    from ballast.wrapper.deferred_init import Pretender, Recorder

    with Recorder(), Pretender():
        yield
