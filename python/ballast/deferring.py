"""Construct models without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Make large tensors inside the `with` block without memory: their initialization is recorded, and
    `ballast.wrap(optimizer, model)` makes the parameters piece by piece, with the same bits as without this block.
    `ballast.load()` reads them from files instead.

    The recording follows these tensors until training begins: cast the model, move it, or initialize it again, in the block or
    after it. They report the device that their values will be on.

    >>> import torch
    >>> with deferred():
    ...     layer = torch.nn.Linear(1000, 1000)
    >>> layer.to(torch.bfloat16).weight
    Parameter of (1000, 1000), torch.bfloat16, made when training begins
    """
    from ballast.torch.parameters.deferred_init import follow_all, recording

    try:
        with recording():
            yield
    finally:
        follow_all()
