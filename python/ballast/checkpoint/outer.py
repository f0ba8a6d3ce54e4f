"""The checkpoints of hosts that train on their own: each host saves its own state, in a folder of the checkpoint's directory,
with its shards of the outer optimizer's copy of each parameter and of its momentum, both in fp32."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ballast import _core
from ballast.checkpoint.kinds import HOST_FOLDER
from ballast.checkpoint.manifest import OUTER, Reader, outline_in
from ballast.checkpoint.tensors import LOADING, Target, TorchTensor, Writers, moment_name
from ballast.checks import refuse
from ballast.outer.hosts import HostGroup
from ballast.outer.optimizer import Fragment, OuterOptimizer, Span
from ballast.ranks import by_first_rank
from ballast.torch.parameters.stored_tensors import Latest
from ballast.torch.training.partition import Partition
from ballast.torch.training.training import Training
from ballast.torch.updates.sharded_state import LazyState

log = logging.getLogger("ballast")
COPY, MOMENTUM = "outer copy", "outer momentum"


def folder_to_save(directory: Path, access: Training) -> Path:
    return directory if access.outer is None else directory / f"host-{access.outer.hosts.own.host}"


def others_remover(directory: Path, access: Training) -> Callable[[], None]:
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


def folder_to_load(directory: Path, access: Training) -> Path:
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

    step: int  # includes the steps that it skipped: hosts skip different ones
    identity: str  # names the training; empty where it had no outer optimizer


def host_folders_in(directory: Path) -> dict[int, HostFolder]:
    """Return the checkpoint of each host that has a folder here."""
    folders = {}
    for path in directory.glob("host-*"):
        found, there = HOST_FOLDER.fullmatch(path.name), outline_in(path)
        if found and there is not None:
            first = there.optimizers[0]
            folders[int(found[1])] = HostFolder(first.step + first.skipped, first.outer_identity)
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


def outer_tensors(access: Training, partition: Partition, names: Mapping[int, str]) -> Iterator[TorchTensor]:
    """Yield the tensors in the same order on all ranks. Some ranks have no shard of a parameter."""
    outer = access.outer
    if outer is None:
        return
    outer.begin(partition)
    shapes = {id(member.parameter): member.parameter.shape for member in partition.members}
    latest = Latest()  # a fragment is read once for all of its parameters, which are saved one after the other

    def read(fragment: Fragment, kind: str, span: Span) -> torch.Tensor:
        return span.of(latest.get(fragment, partial(_values_of, fragment))[kind])

    for fragment in outer.fragments:
        for key, span in fragment.spans.items():
            for kind in (COPY, MOMENTUM) if outer.options.momentum > 0 else (COPY,):
                name = moment_name(names[key], kind)
                lazy = LazyState.of((span.count,), name, partial(read, fragment, kind, span))
                steps, shape = fragment.exchanged_at, shapes[key]
                yield TorchTensor(name, OUTER, lazy, Writers.each, steps=steps, begin=span.first, full_shape=shape)


def _values_of(fragment: Fragment) -> dict[str, torch.Tensor]:
    return dict(zip((COPY, MOMENTUM), fragment.state_values()))


class OuterLoading:
    """The outer state that is loaded. A checkpoint without it lets the outer optimizer begin with the parameters."""

    def __init__(self, access: Training, tensors: Mapping[str, _core.SavedTensor], names: Mapping[int, str], identity: str):
        self._outer = access.outer
        self._identity = identity
        self._names = names
        self._entries = {name: entry for name, entry in tensors.items() if entry.role == OUTER}
        if self._outer is not None and self._entries:
            for _, parameter in access.parameters():
                name = names[id(parameter)]
                if parameter.requires_grad and moment_name(name, COPY) not in self._entries:
                    refuse(
                        "cannot load the outer optimizer: the checkpoint has no outer copy of a parameter",
                        where=f"parameter {name}",
                        needed="the same parameters frozen as when it was saved",
                    )

    def targets(self, partition: Partition) -> list[Target]:
        """Return the targets that make the outer state, which was forgotten when loading began."""
        if self._outer is None or not self._entries:
            return []
        self._outer.begin_to_load(partition, self._identity)
        return [target for fragment in self._outer.fragments for target in self._targets_of(fragment, self._outer)]

    def _targets_of(self, fragment: Fragment, outer: OuterOptimizer) -> list[Target]:
        loader = _FragmentLoader(fragment, outer)
        targets: list[Target] = []
        names = [moment_name(self._names[key], COPY) for key in fragment.spans]
        fragment.exchanged_at = min((self._entries[name].steps for name in names), default=0)
        for key, span in fragment.spans.items():
            for kind in (COPY, MOMENTUM) if outer.options.momentum > 0 else (COPY,):
                name = moment_name(self._names[key], kind)
                if span.count > 0 and name in self._entries:
                    targets.append(_OuterTarget(name, self._entries[name], loader, kind, span))
        loader.left = len(targets)
        return targets


class _FragmentLoader:
    """Collects the values of a fragment, and makes its state of them when they are complete."""

    def __init__(self, fragment: Fragment, outer: OuterOptimizer):
        self._fragment = fragment
        self._outer = outer
        self._values: dict[str, torch.Tensor] = {}
        self.left = 0  # targets

    def values(self, kind: str) -> torch.Tensor:
        if kind not in self._values:
            self._values[kind] = torch.zeros(self._fragment.elements, dtype=torch.float32, device="cpu")
        return self._values[kind]

    def end_target(self) -> None:
        self.left -= 1
        if self.left > 0:
            return
        self._outer.make_state(self._fragment, self.values(COPY))
        if MOMENTUM in self._values and self._fragment.state is not None:
            self._fragment.state.write(self._values[COPY], self._values[MOMENTUM])
        self._values = {}


class _OuterTarget(Target):
    """Takes this rank's elements of one parameter."""

    def __init__(self, name: str, entry: _core.SavedTensor, loader: _FragmentLoader, kind: str, span: Span):
        super().__init__(name, entry, span.first, span.count)
        self._loader, self._kind, self._span = loader, kind, span

    def fill(self, reader: Reader) -> None:
        flat = self._span.of(self._loader.values(self._kind))
        reader.copy_elements(self.name, self.entry, (self.first, self.count), flat.data_ptr())
        self._loader.end_target()
