"""Begin a run from a checkpoint, where its records are lost or it has none."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ballast.checkpoint import manifest
from ballast.checkpoint.loading import load_current
from ballast.checkpoint.run_notice import tell_run
from ballast.checks import refuse
from ballast.connecting import Group
from ballast.wrapper.collectives import by_first_rank
from ballast.wrapper.session import Session

log = logging.getLogger("ballast")


def newest_checkpoint(group: Group, folder: str, model: torch.nn.Module | None) -> str:
    """Return the directory of the newest checkpoint that rank 0 finds in `folder`: itself, or one right below. It is empty if
    there is none. All ranks call it together."""
    if model is None:
        refuse(f"checkpoint={folder!r} needs the model, whose parameters it holds", needed="wrap(optimizer, model, ...)")
    return by_first_rank(group, "look for a checkpoint", lambda: _newest_in(Path(folder)))


def _newest_in(folder: Path) -> str:
    steps = {path: _step_of(path) for path in [folder, *sorted(folder.glob("*/"))]}
    newest = max(steps, key=lambda path: steps[path])
    return str(newest) if steps[newest] >= 0 else ""


def _step_of(directory: Path) -> int:
    """Return the step of a checkpoint; -1 where there is none that can be read."""
    content = manifest.content_in(directory)
    return int(content["step"]) if content else -1


def begin_from_checkpoint(session: Session, model: torch.nn.Module | None) -> None:
    """Load the checkpoint of the options, if the run has made no step. All ranks call it together.

    A start that ends while it loads leaves a run that has made no step, so the next one loads it again.
    """
    options, partition = session.options, session.partition_now()
    if not options.checkpoint or partition.steps > 0:
        return
    assert model is not None  # newest_checkpoint() has refused it
    lost = partition.lost
    directory = Path(options.checkpoint)
    load_current(directory, model, [session.checkpoint])
    tell_run(session.checkpoint, directory)
    if session.group.rank > 0:
        return
    step = session.checkpoint.steps
    begins = f'run "{options.run}" begins from checkpoint {directory} of step {step}'
    if lost is None:
        log.warning("%s: no rank has records of a step", begins)
    else:
        reason, newest = lost
        log.warning("%s: its records were of step %s, so %s steps are lost: %s", begins, newest, max(0, newest - step), reason)
