"""Save and load checkpoints that any number of ranks can read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from ballast.checks import refuse

if TYPE_CHECKING:
    import torch

    from ballast.checkpoint.pending_save import PendingSave

    Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@overload
def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    extra: Any = None,
    wait: Literal[True] = True,
) -> None: ...
@overload
def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    extra: Any = None,
    wait: Literal[False],
) -> PendingSave: ...
@overload
def save(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers, *, extra: Any = None, wait: bool
) -> PendingSave | None: ...


def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    extra: Any = None,
    wait: bool = True,
) -> PendingSave | None:
    """Save the model and the optimizer's state to a directory. All ranks call this together; each writes its local
    shards.

    >>> import tempfile, torch, ballast
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save(directory, model, optimizer, extra={"epoch": 3})
    ...     load_checkpoint(directory, model, optimizer)
    {'epoch': 3}

    With `wrap(outer=...)` each host saves its own state to a folder of the directory, such as `host-0`. Folders of hosts
    that do not take part, such as a lost one, are removed.

    `optimizer` is a list if the model has several: one checkpoint holds all of them.

    All hosts see the directory, except with `outer=`: B1001 on all ranks otherwise, and the previous checkpoint stays.

    A directory holds the checkpoint of one model, or of one part of a model if ranks train different parts
    (`process_group`). An existing checkpoint stays the current one until the new one is complete, whatever happens, and
    is removed then.

    Each rank saves its own `extra`: anything that `torch.load(weights_only=True)` can read, such as a scheduler's
    state_dict(), the position in the data, or the state of random generators. Buffers are those of rank 0.

    With `wait=False`, each rank copies what it saves to the host's memory, and the call returns a PendingSave. The training
    continues while a thread writes the copy. The checkpoint becomes the current one when all ranks have written their files.
    The next save(), load_checkpoint() and close() wait for it first, and raise its error unless `wait()` of the PendingSave
    has raised it. The end of the program waits for it too. The copy includes what is kept on drives: B2001 says on all ranks
    that a host has too little memory for it.

    Raises B2204 on all ranks while another job saves to the directory, or if another job has saved there since this
    training last saved or loaded. The training can continue, and save to another directory or later.
    """
    from ballast.checkpoint.inventory import accesses_of
    from ballast.checkpoint.pending_save import save_in_background, save_now

    accesses = accesses_of(optimizer, model)
    for access in accesses:
        access.finish_pending()
    if not wait:
        return save_in_background(Path(directory), model, accesses, extra)
    save_now(Path(directory), model, accesses, extra)
    return None


def load_checkpoint(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers
) -> Any:
    """Restore the model and the optimizer from a checkpoint, and return the `extra` of this rank.

    All ranks call this together. The number of ranks, the stage, the tiers and the state format may differ from those
    that saved. Gradients since the last step are dropped. Several optimizers are a list, in the order of the saved one.
    All ranks read the files, so every host sees the directory, or has a copy of it at the same path.

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

    With `wrap(outer=...)` all hosts load the last step that one of them has saved. A host that has not saved it, or that
    is new, loads the folder of another one, and gets the `extra` of that host.

    With another number of ranks, `extra` is that of rank `rank % saved_ranks`. Its tensors are on the host.

    Checkpoints of other programs are read too: directories of `torch.distributed.checkpoint` (FSDP2, Accelerate, Lightning),
    of DeepSpeed (ZeRO stages 1 to 3, and universal), and files of `torch.save()`, or folders with them, that hold a model and
    its optimizer. The parameters, and the moments and steps of those that are trained, are loaded. From files of torch the
    options of parameter groups are loaded too, with a warning that names each that changes, and the result is their entry
    `extra`.
    """
    from ballast.checkpoint.foreign_import import ForeignImport
    from ballast.checkpoint.host_folders import folder_to_load
    from ballast.checkpoint.inventory import accesses_of
    from ballast.checkpoint.kinds import kind_of
    from ballast.checkpoint.loading import load_current
    from ballast.checkpoint.loading_part import LOADING
    from ballast.checkpoint.run_notice import tell_run
    from ballast.torch.collectives import by_first_rank

    accesses = accesses_of(optimizer, model)
    for access in accesses:
        access.finish_pending()
    path = folder_to_load(Path(directory), accesses[0])
    if by_first_rank(accesses[0].group, LOADING, lambda: kind_of(path)) in ("", "ballast"):
        extra = load_current(path, model, accesses)
        for access in accesses:
            tell_run(access, path)
        return extra
    if len(accesses) > 1:
        refuse(
            "cannot load another program's checkpoint into several optimizers: it names the state of one",
            where=str(path),
            needed="ballast.load(model, directory), which loads the model alone; or one optimizer",
        )
    return ForeignImport(path, model, accesses[0]).run()
