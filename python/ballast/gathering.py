"""Read and write parameters that are partitioned over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ballast.torch.calls.hooks import Trainer


@contextmanager
def gather(what: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hold full parameters inside the `with` block, which all ranks enter together.

    All writes to the parameters are kept: in place, through `.data`, or by assigning another tensor to `.data`. Every
    rank writes the same values. Assigning a new Parameter to a module is refused. In stage 3 the parameters are copies
    until the block ends, so steps and `ballast.save()` come outside of it.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> with gather(layer):
    ...     layer.weight.shape
    torch.Size([1, 2])
    """
    from ballast.torch.parameters.managed_parameter import by_owner

    wanted = _parameters_of(what)
    for owner, _ in by_owner(wanted):
        owner.begin()  # it partitions other parameters, too
    with ExitStack() as stack:
        for owner, parameters in by_owner(wanted):
            stack.enter_context(owner.gathered(parameters))
        for trainer, parameters in _by_trainer(wanted):
            stack.enter_context(trainer.gathered(parameters))
        yield


@contextmanager
def gather_to_read(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hold full parameters as `gather()` does, for reading only: writes are not detected at the end."""
    from ballast.torch.parameters.managed_parameter import by_owner

    with ExitStack() as stack:
        for owner, owned in by_owner(parameters):
            stack.enter_context(owner.gathered(owned, keeps_writes=False))
        yield


def _by_trainer(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[Trainer, list[torch.nn.Parameter]]]:
    """Group the trained parameters whose values torch has by the session that trains them."""
    from ballast.torch.calls.hooks import trainer_of
    from ballast.torch.parameters.managed_parameter import owner_of

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
