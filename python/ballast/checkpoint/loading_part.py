"""Load one optimizer of a checkpoint, with the parameters that it has or shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.agreement import Agreement
from ballast.checkpoint.contents import SavedOptimizer, Tensor
from ballast.checkpoint.custom_state import CustomState
from ballast.checkpoint.outer_state import OuterLoading
from ballast.checkpoint.pieces import Cut, cover
from ballast.checkpoint.stream import Stream
from ballast.checkpoint.targets import PlainTensor, Target, TrainedTensor
from ballast.checkpoint.torch_tensors import moment_name
from ballast.torch.memory import tensor_of
from ballast.torch.parameters.placeholder import plain
from ballast.torch.parameters.units import Member
from ballast.torch.training.checkpoint_access import CheckpointAccess
from ballast.torch.training.partition import Partition
from ballast.torch.updates.rules import set_options
from ballast.torch.updates.updates import State

LOADING = "loading a checkpoint"
OPAQUE = _core.ChunkKind(parameter=_core.DType.u8, format=None, momentum=False, variance=False)  # of bytes as they are


@dataclass(frozen=True)
class Source:
    """A checkpoint that is loaded, and the agreement of the ranks about it."""

    files: list[str]  # by rank that saved
    tensors: Mapping[str, Tensor]
    names: Mapping[int, str]  # by id of the parameter
    agreement: Agreement


class LoadingPart:
    """Loads one optimizer. The constructor checks everything that can be checked; then all ranks call begin() and fill()
    together."""

    def __init__(self, source: Source, access: CheckpointAccess, saved: SavedOptimizer):
        self._source = source
        self._tensors, self._names, self._agreement = source.tensors, source.names, source.agreement
        self._access = access
        self._saved = saved
        self._custom = CustomState(access, source.tensors, source.names)
        self._custom.require_stored()
        self._outer = OuterLoading(access, source.tensors, source.names, saved.outer_identity)
        self._options = access.options_to_set([group["options"] for group in saved.groups])
        self._partition: Partition | None = None
        self.partitioned: set[int] = set()  # ids of the parameters in it
        self._frozen_state: State = {}
        self._thawed: State = {}

    def begin(self) -> None:
        """Make a partition that continues after the saved step."""
        set_options(self._access.optimizer.param_groups, self._options)
        if self._access.has_custom_step:
            self._frozen_state = self._custom.frozen()
        else:
            self._frozen_state, self._thawed = self._empty_moments()
        made = {id(each): self._tensors[self._name(each)].steps for each in self._saved_parameters()}
        self._partition = self._access.begin_from(made, self._saved.step, self._frozen_state)
        self.partitioned = {id(member.parameter) for member in self._partition.all_members}

    def fill(self, rest: Iterable[torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Read what belongs to the optimizer, and these parameters and buffers."""
        partition = self._partition
        assert partition is not None  # begin() has made it
        self._fill(partition, self._targets(rest, buffers) + self._outer.targets(partition))
        if any(self._access.group.all_reduce([len(self._thawed)])):
            partition.write_moments(moments_by_kind(self._thawed, self._access))
        self._access.skipped = self._saved.skipped

    def _empty_moments(self) -> tuple[State, State]:
        """Allocate the moments of parameters that were frozen when they were saved, or are frozen now. Return those
        that stay with frozen parameters, and those that return to parameters that are trained now."""
        frozen_state: State = {}
        thawed: State = {}
        for parameter in self._saved_parameters():
            name = self._name(parameter)
            entry = self._tensors[name]
            kept = [moment for _, moment in self._access.names_of_moments() if moment_name(name, moment) in self._tensors]
            if not parameter.requires_grad and entry.role == "trained":
                kept = [moment for _, moment in self._access.names_of_moments()]
            if not kept or (parameter.requires_grad and entry.role == "trained"):
                continue
            values = {moment: torch.zeros(parameter.shape, dtype=torch.float32, device="cpu") for moment in kept}
            where = thawed if parameter.requires_grad else frozen_state
            where[id(parameter)] = {"step": torch.tensor(float(entry.steps), device="cpu"), **values}
        return frozen_state, thawed

    def _targets(self, rest: Iterable[torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> list[Target]:
        """Return the targets of the tensors that are not sharded. Each rank fills all of them."""
        moments = {} if self._access.has_custom_step else {**self._frozen_state, **self._thawed}
        targets: list[Target] = []
        for parameter in [*self._saved_parameters(), *rest]:
            name = self._name(parameter)
            entry, own = self._tensors[name], moments.get(id(parameter), {})
            outside = None if id(parameter) in self.partitioned else plain(parameter)
            if entry.role != "trained":
                targets += [] if outside is None else [PlainTensor(name, entry, outside)]
                targets += [self._plain_moment(name, moment, own[moment]) for moment in own if moment != "step"]
            elif outside is not None or own:
                by_kind = {kind.name: own[moment] for kind, moment in self._access.names_of_moments() if moment in own}
                targets.append(TrainedTensor(name, entry, outside, by_kind))
        targets += [PlainTensor(name, self._tensors[name], buffer.data) for name, buffer in buffers.items()]
        return targets

    def _plain_moment(self, parameter: str, moment: str, into: torch.Tensor) -> Target:
        name = moment_name(parameter, moment)
        return PlainTensor(name, self._tensors[name], into)

    def _fill(self, partition: Partition, targets: list[Target]) -> None:
        """Read everything in this order: the optimizer's own state, which a run commits with the shards, the shards, and the
        rest."""
        parts = [(partition.member_of(part), part) for part in partition.local_shards()]
        parts = [(member, part) for member, part in parts if self._name(member.parameter) in self._tensors]
        own = self._custom.targets(partition)
        wanted = [cut for target in own for cut in cuts_of(target)]
        wanted += [cut for member, part in parts for cut, _ in self._cuts(member, part)]
        wanted += [cut for target in targets for cut in cuts_of(target)]
        with self._agreement.attempt():
            stream = Stream(self._source.files, (cut.piece for cut in wanted))
        self._agreement.settle()
        self._fill_targets(own, stream)
        with self._agreement.attempt():
            self._custom.install(partition)
        self._agreement.settle()

        def change(part: _core.StatePart) -> None:
            with self._agreement.attempt():
                member = partition.member_of(part)
                if self._agreement.error is None and self._name(member.parameter) in self._tensors:
                    self._change(part, member, stream)

        partition.change_shards(change, self._saved.step, self._agreement.settle)
        self._fill_targets(targets, stream)

    def _fill_targets(self, targets: list[Target], stream: Stream) -> None:
        with self._agreement.attempt():
            for target in targets:
                target.begin()
                for cut in cuts_of(target):
                    target.take(stream.go_to(cut.piece, target.name), cut)
                target.finish()
        self._agreement.settle()

    def _cuts(self, member: Member, part: _core.StatePart) -> Iterator[tuple[Cut, int | None]]:
        """Yield what to read of a shard: of the parameter and its moments, and of the optimizer's own values, with the number
        of the value."""
        name, (first, count) = self._name(member.parameter), member.of_parameter(part.first, part.count)
        for cut in cover(self._tensors[name].pieces, first, count):
            yield cut, None
        for number, entry in [] if part.frozen else self._custom.stored(name):
            for cut in cover(entry.pieces, first, count):
                yield cut, number

    def _change(self, part: _core.StatePart, member: Member, stream: Stream) -> None:
        name = self._name(member.parameter)
        entry, values = self._tensors[name], dict(self._custom.stored(name))
        kind, width = OPAQUE if member.is_opaque else entry.kind(), member.width
        for cut, number in self._cuts(member, part):
            reader = stream.go_to(cut.piece, name)
            if number is None:
                elements = (cut.piece.count * width, cut.first * width, cut.into * width, cut.count * width)
                reader.copy(kind, elements, part)
            else:
                take_values(reader, cut, getattr(torch, values[number].dtype), part.own(number))

    def _saved_parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's parameters, but for those that a converted checkpoint lacks."""
        return [each for _, each in self._access.parameters() if self._name(each) in self._tensors]

    def _name(self, parameter: torch.nn.Parameter) -> str:
        return self._names[id(parameter)]


def cuts_of(target: Target) -> Iterator[Cut]:
    return cover(target.entry.pieces, target.first, target.count)


def take_values(reader: _core.CheckpointReader, cut: Cut, dtype: torch.dtype, into: _core.Memory) -> None:
    """Copy values of each element to the library's memory, in fp32."""
    values = torch.frombuffer(reader.memory(), dtype=dtype)[cut.first : cut.first + cut.count]
    tensor_of(into, torch.float32)[cut.into : cut.into + cut.count] = values


def moments_by_kind(thawed: State, access: CheckpointAccess) -> dict[tuple[int, _core.Moment], torch.Tensor]:
    """Order moments by parameter and kind."""
    return {
        (parameter, kind): values[name]
        for parameter, values in thawed.items()
        for kind, name in access.names_of_moments()
        if name in values
    }
