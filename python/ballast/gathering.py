"""Looking at parameters that are partitioned over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

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
    wanted = list(what)
    for window, _ in by_window(wanted):
        window.begin()  # by which others may be partitioned too
    with ExitStack() as stack:
        for window, parameters in by_window(wanted):
            stack.enter_context(window.gathered(parameters))
        yield


def by_window(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """Of those that are not simply there, what gathers them."""
    found: dict[int, tuple[Any, list[torch.nn.Parameter]]] = {}
    for parameter in parameters:
        window = getattr(parameter, "ballast_window", None)
        if window is not None:
            found.setdefault(id(window), (window, []))[1].append(parameter)
    return list(found.values())
