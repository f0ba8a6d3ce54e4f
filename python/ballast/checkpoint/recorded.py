"""Read a run of `wrap(run=...)` without a training, as a checkpoint of its trained parameters, whose pieces are records."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ballast import _core
from ballast.checkpoint.kinds import run_at
from ballast.checkpoint.manifest import Checkpoint
from ballast.errors import FailureError
from ballast.torch.updates.commit_metadata import decode_missed_steps


def recorded(path: Path) -> Checkpoint:
    """Return the newest commit of a run. It has no frozen parameters, no buffers and no options."""
    run = _core.RecordedRun(*map(str, run_at(path)))
    found = Checkpoint(run.checkpoint(), str(path))
    with suppress(FailureError):  # the note of a trainer in C++, or of an optimizer's own step, is none of ours
        missed = decode_missed_steps(run.note(), found.step)
        for name, steps in zip(run.trained, missed) if len(missed) == len(run.trained) else ():
            found.tensors[name].steps -= steps
    return found
