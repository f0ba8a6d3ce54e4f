"""The folders of hosts that train on their own: each host saves its own state, in a folder of the checkpoint's directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ballast.checkpoint.kinds import HOST_FOLDER
from ballast.checkpoint.manifest import content_in
from ballast.checks import refuse
from ballast.outer.hosts import HostGroup
from ballast.torch.collectives import by_first_rank
from ballast.torch.training.checkpoint_access import CheckpointAccess

log = logging.getLogger("ballast")

LOADING = "loading a checkpoint"


def folder_to_save(directory: Path, access: CheckpointAccess) -> Path:
    return directory if access.outer is None else directory / f"host-{access.outer.hosts.own.host}"


def others_remover(directory: Path, access: CheckpointAccess) -> Callable[[], None]:
    """Return what removes the folders of hosts that do not take part now, after a save: they are of an earlier training with
    more hosts, or of a host that was lost, and may have a later step than the folders of this training."""
    if access.outer is None or access.group.rank != 0:
        return lambda: None
    return partial(_remove_others, directory, frozenset(access.outer.hosts.members))


def _remove_others(directory: Path, members: Collection[int]) -> None:
    for path in directory.glob("host-*"):
        found = HOST_FOLDER.fullmatch(path.name)
        if found and int(found[1]) not in members:
            shutil.rmtree(path, ignore_errors=True)  # all hosts do this, perhaps at the same time


def folder_to_load(directory: Path, access: CheckpointAccess) -> Path:
    """Return the folder of this host, or that of another one if only that has the last step: there are more hosts now, or
    a host was lost. All hosts call this together. A directory without such folders is a checkpoint of one training."""
    outer = access.outer
    if outer is None:
        return directory
    found: dict[int, HostFolder] = by_first_rank(access.group, LOADING, lambda: host_folders_in(directory))
    require_one_training(outer.hosts, found)
    steps = {host: folder.step for host, folder in found.items()}
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


class HostFolder(NamedTuple):
    """The checkpoint of a host."""

    step: int  # with the steps that it skipped: hosts skip different ones
    identity: str  # of the training; empty in checkpoints of older versions


def host_folders_in(directory: Path) -> dict[int, HostFolder]:
    """Return the checkpoint of each host that has a folder here."""
    folders = {}
    for path in directory.glob("host-*"):
        found, content = HOST_FOLDER.fullmatch(path.name), content_in(path)
        if found and content:
            step = int(content["step"]) + int(content["skipped"])
            folders[int(found[1])] = HostFolder(step, str(content.get("outer_identity", "")))
    return folders


def require_one_training(hosts: HostGroup, folders: Mapping[int, HostFolder]) -> None:
    """Refuse folders of different trainings, which one of the hosts sees, or different hosts. All hosts call this together."""
    mine = [int(folder.identity or "0", 16) for folder in folders.values()]
    rows = hosts.rows([len(mine), min(mine, default=0), max(mine, default=0)])
    if len({identity for count, *ends in rows if count > 0 for identity in ends}) < 2:
        return
    here = [f"host-{host} of {folder.identity or 'none'}, step {folder.step}" for host, folder in sorted(folders.items())]
    refuse(
        "cannot load a checkpoint: the folders of the hosts are of different trainings",
        where=f"{hosts.own.describe(hosts.own.host)} sees {', '.join(here) or 'no folder'}",
        needed="folders of one training on all hosts",
        remedy="Remove the folders of the training that you do not want to resume, on each host; or load another directory.",
    )
