"""Looking at parameters that are partitioned over ranks, and writing to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def gather(what: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hold parameters whole inside the `with` block, which all ranks enter together.

    Writes to the parameters are kept, however they are made: in place, through `.data`, or by another tensor for `.data`. Every
    rank writes the same values. A new Parameter in the place of one is refused. In stage 3 the parameters are copies until the
    block ends: steps and `ballast.save()` come outside of it.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> with gather(layer):
    ...     layer.weight.shape
    torch.Size([1, 2])
    """
    wanted = _parameters_of(what)
    for window, _ in by_window(wanted):
        window.begin()  # by which others may be partitioned too
    with ExitStack() as stack:
        for window, parameters in by_window(wanted):
            stack.enter_context(window.gathered(parameters))
        for session, parameters in _by_session(wanted):
            stack.enter_context(session.gathered(parameters))
        yield


@contextmanager
def gather_to_read(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hold parameters whole as `gather()` does, for who writes nothing: nothing is looked for at the end."""
    with ExitStack() as stack:
        for window, of_window in by_window(parameters):
            stack.enter_context(window.gathered(of_window, keeps_writes=False))
        yield


def by_window(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """Of those that are not simply there, what gathers them."""
    return _by_owner((getattr(parameter, "ballast_window", None), parameter) for parameter in parameters)


def _by_session(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """Of those that are whole and trained, what trains them."""
    from ballast.wrapper.hooks import session_of

    whole = (parameter for parameter in parameters if not hasattr(parameter, "ballast_window"))
    return _by_owner((session_of(parameter), parameter) for parameter in whole)


def _by_owner(pairs: Iterable[tuple[Any, torch.nn.Parameter]]) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    found: dict[int, tuple[Any, list[torch.nn.Parameter]]] = {}
    for owner, parameter in pairs:
        if owner is not None:
            found.setdefault(id(owner), (owner, []))[1].append(parameter)
    return list(found.values())


def _parameters_of(what: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    import torch

    if isinstance(what, torch.nn.Module):
        return [*what.parameters()]
    return [what] if isinstance(what, torch.nn.Parameter) else [*what]
