"""The folders of hosts that train on their own: each host saves its own state, in a folder of the checkpoint's directory."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from ballast.checkpoint.kinds import HOST_FOLDER
from ballast.checkpoint.manifest import content_in
from ballast.checks import refuse
from ballast.wrapper.checkpoint_access import CheckpointAccess
from ballast.wrapper.collectives import by_first_rank

log = logging.getLogger("ballast")

LOADING = "loading a checkpoint"


def folder_to_save(directory: Path, access: CheckpointAccess) -> Path:
    return directory if access.outer is None else directory / f"host-{access.outer.hosts.own.host}"


def remove_folders_of_others(directory: Path, access: CheckpointAccess) -> None:
    """Remove the folders of hosts that do not take part, after a save: they are of an earlier training with more hosts, or of
    a host that was lost, and may have a later step than the folders of this training."""
    if access.outer is not None and access.group.rank == 0:
        for path in directory.glob("host-*"):
            found = HOST_FOLDER.fullmatch(path.name)
            if found and int(found[1]) not in access.outer.hosts.members:
                shutil.rmtree(path, ignore_errors=True)  # all hosts do this, perhaps at the same time


def folder_to_load(directory: Path, access: CheckpointAccess) -> Path:
    """Return the folder of this host, or that of another one if only that has the last step: there are more hosts now, or
    a host was lost. All hosts call this together. A directory without such folders is a checkpoint of one training."""
    outer = access.outer
    if outer is None:
        return directory
    steps: dict[int, int] = by_first_rank(access.group, LOADING, lambda: steps_in(directory))
    last = max(row[0] for row in outer.hosts.rows([max(steps.values(), default=-1)]))
    usable = sorted(host for host, step in steps.items() if step == last)
    counts = [row[0] for row in outer.hosts.rows([len(usable)])]
    if last < 0:
        return directory
    own = outer.hosts.own
    if not all(counts):
        without = [outer.hosts.members[number] for number, count in enumerate(counts) if count == 0]
        refuse(
            f"cannot load a checkpoint: not all hosts have one of step {last}",
            where=", ".join(own.describe(host) for host in without),
            needed="a directory that all hosts share, or a copy of a folder with that step on each host",
        )
    chosen = own.host if own.host in usable else usable[own.host % len(usable)]
    if chosen != own.host and access.group.rank == 0:
        log.info("host %d loads the checkpoint of host %d: it has none of step %d", own.host, chosen, last)
    return directory / f"host-{chosen}"


def steps_in(directory: Path) -> dict[int, int]:
    """Return the step of each host's checkpoint, with the steps that it skipped: hosts skip different ones."""
    steps = {}
    for path in directory.glob("host-*"):
        found, content = HOST_FOLDER.fullmatch(path.name), content_in(path)
        if found and content:
            steps[int(found[1])] = int(content["step"]) + int(content["skipped"])
    return steps
