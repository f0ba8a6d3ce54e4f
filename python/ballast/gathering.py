"""Looking at parameters that are partitioned over ranks, and writing to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ballast.wrapper.hooks import Trainer


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
    from ballast.wrapper.managed_parameter import by_owner

    wanted = _parameters_of(what)
    for owner, _ in by_owner(wanted):
        owner.begin()  # by which others may be partitioned too
    with ExitStack() as stack:
        for owner, parameters in by_owner(wanted):
            stack.enter_context(owner.gathered(parameters))
        for trainer, parameters in _by_trainer(wanted):
            stack.enter_context(trainer.gathered(parameters))
        yield


@contextmanager
def gather_to_read(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hold parameters whole as `gather()` does, for who writes nothing: nothing is looked for at the end."""
    from ballast.wrapper.managed_parameter import by_owner

    with ExitStack() as stack:
        for owner, owned in by_owner(parameters):
            stack.enter_context(owner.gathered(owned, keeps_writes=False))
        yield


def _by_trainer(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[Trainer, list[torch.nn.Parameter]]]:
    """Return the parameters that torch has, and that are trained, with what trains them."""
    from ballast.wrapper.hooks import trainer_of
    from ballast.wrapper.managed_parameter import owner_of

    found: dict[int, tuple[Trainer, list[torch.nn.Parameter]]] = {}
    for parameter in parameters:
        trainer = trainer_of(parameter) if owner_of(parameter) is None else None
        if trainer is not None:
            found.setdefault(id(trainer), (trainer, []))[1].append(parameter)
    return list(found.values())


def _parameters_of(what: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    import torch

    if isinstance(what, torch.nn.Module):
        return [*what.parameters()]
    return [what] if isinstance(what, torch.nn.Parameter) else [*what]
