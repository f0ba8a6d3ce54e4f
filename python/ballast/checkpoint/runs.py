"""A run and its checkpoints: tell the run where its newest one is, and begin the run from it where its records are lost, or it
has none. Without a training, a run is read as a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.kinds import run_at
from ballast.checkpoint.loading import load_current
from ballast.checkpoint.manifest import FOLDER
from ballast.checkpoint.tensors import buffers_by_name
from ballast.checks import refuse
from ballast.errors import Error, FailureError
from ballast.ranks import Group, by_first_rank
from ballast.torch.training.joint_runs import join_runs
from ballast.torch.training.training import Training
from ballast.torch.updates.commit_metadata import decode_missed_steps

log = logging.getLogger("ballast")
CHANGED = ("running_mean", "running_var", "num_batches_tracked")  # buffers that torch's norms change in training


def tell_run(access: Training, directory: Path) -> None:
    """Write the step and the directory to this rank's folder of the run, if there is a run."""
    notice_for_run(access, directory)()


def notice_for_run(access: Training, directory: Path) -> Callable[[], None]:
    """Return what tells the run later that the directory has a checkpoint of the step that is the last one now."""
    options = access.options
    if not options.run.name:
        return lambda: None
    notice = (str(options.directories[0]), options.run.name, access.group.rank, access.steps, os.path.realpath(directory))
    return partial(_tell, *notice)


def _tell(*notice: Any) -> None:
    try:
        _core.tell_run(*notice)
    except Error as error:  # the checkpoint is there all the same
        log.warning("the run does not know its newest checkpoint: %s", error)


def newest_checkpoint(group: Group, folder: str, model: torch.nn.Module | None) -> str:
    """Return the directory of the newest checkpoint that rank 0 finds in `folder`: itself, or one right below. It is empty if
    there is none. If none of them can be read, it is any of them: a run that has its records needs none. All ranks call it
    together."""
    if model is None:
        refuse(f"checkpoint={folder!r} needs the model, whose parameters it holds", needed="wrap(optimizer, model, ...)")
    return by_first_rank(group, "look for a checkpoint", lambda: _newest_in(Path(folder)))


def _newest_in(folder: Path) -> str:
    steps: dict[Path, int] = {}
    unreadable: dict[Path, Error] = {}
    for path in [folder, *filter(_may_be_checkpoint, sorted(folder.glob("*/")))]:
        try:
            if there := manifest.outline(path):
                steps[path] = there.step
        except Error as error:
            unreadable[path] = error
    newest = max(steps, key=lambda path: steps[path], default=None)
    if newest is None:
        return str(next(iter(unreadable), ""))
    for path, reason in unreadable.items():
        log.warning(
            "checkpoint %s cannot be read, and may be newer than %s of step %d, which is used: %s",
            path,
            newest,
            steps[newest],
            reason.what_happened,
        )
    return str(newest)


def _may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder below that of the checkpoints can be one. A save that was killed may leave a manifest in its own
    folder, which is no checkpoint. Folders that this process cannot enter belong to others, such as lost+found."""
    return not FOLDER.fullmatch(path.name) and os.access(path, os.X_OK)


def recorded(path: Path) -> manifest.Checkpoint:
    """Return the newest commit of a run as a checkpoint, whose pieces are records. It has no frozen parameters, no buffers and
    no options."""
    run = _core.RecordedRun(*map(str, run_at(path)))
    found = manifest.Checkpoint(run.checkpoint(), str(path))
    with suppress(FailureError):  # the note of a trainer in C++, or of an optimizer's own step, is none of ours
        missed = decode_missed_steps(run.note(), found.step)
        for name, steps in zip(run.trained, missed) if len(missed) == len(run.trained) else ():
            found.tensors[name].steps -= steps
    return found


def begin_runs(trainings: Sequence[Training], model: torch.nn.Module | None) -> None:
    """Resume the runs of a model's optimizers, or begin them. All ranks call it together."""
    if len(trainings) > 1:
        for training, run in zip(trainings, join_runs(trainings[0].group, [training.options for training in trainings])):
            training.join_run(run)
    for training in trainings:
        training.partition_now()
    if any(training.partitioner.has_resumed for training in trainings):
        _warn_of_buffers(trainings[0], model)
    _begin_from_checkpoint(trainings, model)


def _warn_of_buffers(training: Training, model: torch.nn.Module | None) -> None:
    """Warn of buffers that training is known to change: a run does not keep them."""
    names = [] if model is None else [name for name in buffers_by_name(model) if name.rpartition(".")[2] in CHANGED]
    if names and training.group.rank == 0:
        log.warning(
            'run "%s" resumes after step %d, and keeps no buffers: %s%s have the values of the model at wrap(). Save buffers '
            "yourself, and load them at each start; or resume from ballast.save(), which keeps them",
            training.options.run.name,
            training.steps,
            ", ".join(names[:3]),
            f" and {len(names) - 3} more" if len(names) > 3 else "",
        )


def _begin_from_checkpoint(trainings: Sequence[Training], model: torch.nn.Module | None) -> None:
    """Load the checkpoint of the options, if the runs have made no step.

    A start that ends while it loads leaves runs that have made no step, so the next one loads it again.
    """
    first, options = trainings[0], trainings[0].options
    if not options.run.checkpoint or any(training.partition_now().steps > 0 for training in trainings):
        return
    assert model is not None  # newest_checkpoint() has refused it
    lost = next((found for training in trainings if (found := training.lost)), None)
    directory = Path(options.run.checkpoint)
    load_current(manifest.LocalCheckpoint(directory), model, trainings)
    for training in trainings:
        tell_run(training, directory)
    if first.group.rank > 0:
        return
    step = max(training.steps for training in trainings)
    begins = f'run "{options.run.name}" begins from checkpoint {directory} of step {step}'
    if lost is None:
        log.warning("%s: no rank has records of a step", begins)
    else:
        reason, newest = lost
        known = newest is not None and f"its records were of step {newest}, so {max(0, newest - step)} steps are lost"
        log.warning("%s: %s: %s", begins, known or "its records are lost, and with them the number of its steps", reason)
