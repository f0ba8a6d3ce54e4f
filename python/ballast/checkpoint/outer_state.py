"""Save and load the state of the outer optimizer: its copy of each parameter, and its momentum, both in fp32. A rank has its
shard of them, so other ranks can read any other shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from ballast import _core
from ballast.checkpoint.manifest import OUTER, Tensor
from ballast.checkpoint.pieces import Cut
from ballast.checkpoint.targets import Target
from ballast.checkpoint.torch_tensors import TorchTensor, Writers, moment_name
from ballast.checks import refuse
from ballast.outer.optimizer import Fragment, OuterOptimizer
from ballast.outer.state import Span
from ballast.wrapper.checkpoint_access import CheckpointAccess
from ballast.wrapper.partition import Partition
from ballast.wrapper.state import LazyState

COPY, MOMENTUM = "outer copy", "outer momentum"


def outer_tensors(access: CheckpointAccess, partition: Partition, names: Mapping[int, str]) -> Iterator[TorchTensor]:
    """Yield the tensors in the same order on all ranks. Some ranks have no shard of a parameter."""
    outer = access.outer
    if outer is None:
        return
    outer.begin(partition)
    shapes = {id(member.parameter): member.parameter.shape for member in partition.members}
    writers = Writers.in_turns if access.options.stage == 0 else Writers.each
    for fragment in outer.fragments:
        reader = _Reader(fragment)
        for key, span in fragment.spans.items():
            for kind in (COPY, MOMENTUM) if outer.options.momentum > 0 else (COPY,):
                name = moment_name(names[key], kind)
                lazy = LazyState((span.count,), name, partial(reader.read, kind, span))
                yield TorchTensor(name, OUTER, lazy, writers, begin=span.first, full_shape=shapes[key])


class _Reader:
    """Reads a fragment once for all of its parameters, which are saved one after the other."""

    def __init__(self, fragment: Fragment):
        self._fragment = fragment
        self._values: dict[str, torch.Tensor] = {}

    def read(self, kind: str, span: Span) -> torch.Tensor:
        state = self._fragment.state
        assert state is not None  # there are elements
        kinds = (COPY, MOMENTUM) if state.has_momentum else (COPY,)
        if not self._values:
            self._values = {each: torch.empty(state.count, dtype=torch.float32, device="cpu") for each in kinds}
            state.read(*self._values.values())
        values = span.of(self._values[kind])
        last = [each for each in self._fragment.spans.values() if each.count > 0][-1]
        if span is last and kind == kinds[-1]:
            self._values = {}
        return values


class OuterLoading:
    """The outer state that is loaded. A checkpoint without it lets the outer optimizer begin with the parameters."""

    def __init__(self, access: CheckpointAccess, tensors: Mapping[str, Tensor], names: Mapping[int, str]):
        self._outer = access.outer
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
        self._outer.cut(partition)
        return [target for fragment in self._outer.fragments for target in self._targets_of(fragment, self._outer)]

    def _targets_of(self, fragment: Fragment, outer: OuterOptimizer) -> list[Target]:
        made = _FragmentInMaking(fragment, outer)
        targets: list[Target] = []
        for key, span in fragment.spans.items():
            for kind in (COPY, MOMENTUM) if outer.options.momentum > 0 else (COPY,):
                name = moment_name(self._names[key], kind)
                if span.count > 0 and name in self._entries:
                    targets.append(_OuterTarget(name, self._entries[name], made, kind, span))
        made.left = len(targets)
        return targets


class _FragmentInMaking:
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

    def __init__(self, name: str, entry: Tensor, made: _FragmentInMaking, kind: str, span: Span):
        self.name, self.entry = name, entry
        self.first, self.count = span.first, span.count
        self._made, self._kind, self._span = made, kind, span

    def begin(self) -> None:
        self._into = self._span.of(self._made.values(self._kind))

    def take(self, reader: _core.CheckpointReader, cut: Cut) -> None:
        values = torch.frombuffer(reader.memory(), dtype=torch.float32)[cut.first : cut.first + cut.count]
        self._into[cut.into : cut.into + cut.count] = values

    def finish(self) -> None:
        del self._into
        self._made.end_target()
