"""Checkpoints that any number of ranks can read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def save(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, extra: Any = None
) -> None:
    """Writes the model and the optimizer's state to a directory, which all ranks do together, each its own part.

    >>> import tempfile, torch, ballast
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save(directory, model, optimizer, extra={"epoch": 3})
    ...     load_checkpoint(directory, model, optimizer)
    {'epoch': 3}

    A directory is for one model, or for one part of it, where ranks have different ones (`process_group`). A checkpoint that is
    in it already stays the current one until the new one is whole, whatever happens, and goes then. `extra` is the rank's own:
    what `torch.load(weights_only=True)` can read, such as a scheduler's state_dict(), a place in the data, the state of random
    numbers.
    Buffers are those of rank 0.

    Raises B2204 on all ranks while another job saves to the directory, or if another job has saved there since this training
    last saved or loaded. The training can continue, and save to another directory or later.
    """
    from ballast.checkpoint.holdings import session_of
    from ballast.checkpoint.saving import Saving

    Saving(Path(directory), model, session_of(optimizer), extra).run()


def load_checkpoint(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    """Makes the model and the optimizer what they were when `save()` was called, and returns what it was given as `extra`. All
    ranks do this together; their number, stage, tiers and state format may be others than they were. Gradients that have come
    since the last step are gone.

    >>> import tempfile, torch, ballast
    >>> def make():
    ...     model = torch.nn.Linear(4, 1)
    ...     return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     model, optimizer = make()
    ...     save(directory, model, optimizer)
    ...     again, its_optimizer = make()
    ...     load_checkpoint(directory, again, its_optimizer)
    >>> bool((again.weight == model.weight).all())
    True

    Without as many ranks as there were, `extra` is that of rank `rank % ranks_then`. Its tensors are on the host.

    Directories of `torch.distributed.checkpoint`, and universal ones of DeepSpeed, are read too: parameters, moments and steps
    of what is trained, as each rank's parts of it; None is returned.
    """
    from ballast.checkpoint.adopting import Adopting
    from ballast.checkpoint.foreign import kind_of
    from ballast.checkpoint.holdings import session_of
    from ballast.checkpoint.loading import LOADING, load_current
    from ballast.wrapper.everybody import by_first_rank

    place, session = Path(directory), session_of(optimizer)
    if by_first_rank(session.group, LOADING, lambda: kind_of(place)) in ("", "ballast"):
        return load_current(place, model, session)
    return Adopting(place, model, session).run()
