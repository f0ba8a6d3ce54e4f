"""Save and load the state of the outer optimizer: its copy of each parameter, and its momentum, both in fp32. A rank has its
shard of them, so other ranks can read any other shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from ballast import _core
from ballast.checkpoint.contents import OUTER, Tensor
from ballast.checkpoint.pieces import Cut
from ballast.checkpoint.targets import Target
from ballast.checkpoint.torch_tensors import TorchTensor, Writers, moment_name
from ballast.checks import refuse
from ballast.outer.layout import Fragment, Span
from ballast.outer.optimizer import OuterOptimizer
from ballast.torch.training.checkpoint_access import CheckpointAccess
from ballast.torch.training.partition import Partition
from ballast.torch.updates.shown_state import LazyState

COPY, MOMENTUM = "outer copy", "outer momentum"


def outer_tensors(access: CheckpointAccess, partition: Partition, names: Mapping[int, str]) -> Iterator[TorchTensor]:
    """Yield the tensors in the same order on all ranks. Some ranks have no shard of a parameter."""
    outer = access.outer
    if outer is None:
        return
    outer.begin(partition)
    shapes = {id(member.parameter): member.parameter.shape for member in partition.members}
    reader = _Reader()
    for fragment in outer.fragments:
        for key, span in fragment.spans.items():
            for kind in (COPY, MOMENTUM) if outer.options.momentum > 0 else (COPY,):
                name = moment_name(names[key], kind)
                lazy = LazyState((span.count,), name, partial(reader.read, fragment, kind, span))
                steps, shape = fragment.exchanged_at, shapes[key]
                yield TorchTensor(name, OUTER, lazy, Writers.each, steps=steps, begin=span.first, full_shape=shape)


class _Reader:
    """Reads a fragment once for all of its parameters, which are saved one after the other. Keeps one fragment at a time."""

    def __init__(self) -> None:
        self._fragment: Fragment | None = None
        self._values: dict[str, torch.Tensor] = {}

    def read(self, fragment: Fragment, kind: str, span: Span) -> torch.Tensor:
        if fragment is not self._fragment:
            self._values = {}  # before the next ones are allocated
            self._values = dict(zip((COPY, MOMENTUM), fragment.state_values()))
            self._fragment = fragment
        return span.of(self._values[kind])


class OuterLoading:
    """The outer state that is loaded. A checkpoint without it lets the outer optimizer begin with the parameters."""

    def __init__(self, access: CheckpointAccess, tensors: Mapping[str, Tensor], names: Mapping[int, str], identity: str):
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


class _OuterTarget:
    """Takes this rank's elements of one parameter."""

    def __init__(self, name: str, entry: Tensor, loader: _FragmentLoader, kind: str, span: Span):
        self.name, self.entry = name, entry
        self.first, self.count = span.first, span.count
        self._loader, self._kind, self._span = loader, kind, span

    def begin(self) -> None:
        self._into = self._span.of(self._loader.values(self._kind))

    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None:
        values = torch.frombuffer(reader.memory(), dtype=torch.float32)[cut.first : cut.first + cut.count]
        self._into[cut.into : cut.into + cut.count] = values

    def finish(self) -> None:
        del self._into
        self._loader.end_target()
