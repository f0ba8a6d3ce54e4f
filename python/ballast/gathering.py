"""Looking at parameters that are partitioned over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def gather(what: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Parameters are whole inside of the `with` block, on all ranks, which enter it together. What is written to them there
    is kept. Where nothing is partitioned nothing happens.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> with gather(layer):
    ...     layer.weight.shape
    torch.Size([1, 2])
    """
    import torch

    if isinstance(what, torch.nn.Module):
        what = what.parameters()
    elif isinstance(what, torch.nn.Parameter):
        what = [what]
    by_window: dict[int, list[torch.nn.Parameter]] = {}
    windows = {}
    for parameter in what:
        window = getattr(parameter, "ballast_window", None)
        if window is not None:
            windows[id(window)] = window
            by_window.setdefault(id(window), []).append(parameter)
    with ExitStack() as stack:
        for key, window in windows.items():
            stack.enter_context(window.gathered(by_window[key]))
        yield
