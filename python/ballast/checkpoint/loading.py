"""Load a checkpoint on any number of ranks, at any stage, tier and state format. Everything that can be checked is
checked before anything changes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.agreement import Agreement
from ballast.checkpoint import manifest
from ballast.checkpoint.compatibility import leave_out, require_compatible, use_model_names
from ballast.checkpoint.contents import Checkpoint
from ballast.checkpoint.custom_state import CustomState
from ballast.checkpoint.inventory import (
    buffers_by_name,
    checkpoints_in,
    parameter_names,
    parameters_by_name,
    require_all_partitioned,
    warn_of_left,
)
from ballast.checkpoint.outer_state import OuterLoading
from ballast.checkpoint.pieces import Cut, cover
from ballast.checkpoint.stream import Stream
from ballast.checkpoint.targets import PlainTensor, Target, TrainedTensor
from ballast.checkpoint.torch_tensors import moment_name
from ballast.checkpoint.unpickling import load_without_code
from ballast.wrapper.checkpoint_access import CheckpointAccess
from ballast.wrapper.collectives import by_first_rank
from ballast.wrapper.deferred_params import expect, expect_buffers, require_expected
from ballast.wrapper.group_options import set_options
from ballast.wrapper.memory import tensor_of
from ballast.wrapper.partition import Partition
from ballast.wrapper.ungathered import plain
from ballast.wrapper.units import Member
from ballast.wrapper.updates import State

LOADING = "loading a checkpoint"
OPAQUE = _core.ChunkKind(parameter=_core.DType.u8, format=None, momentum=False, variance=False)  # of bytes as they are


def load_current(directory: Path, model: torch.nn.Module, access: CheckpointAccess) -> Any:
    """Load the checkpoint that the manifest names, and return this rank's `extra`. All ranks call it together, and use
    the manifest that rank 0 reads.

    A save may replace the checkpoint meanwhile, and remove its files. Then the new one is loaded.
    """
    read = partial(by_first_rank, access.group, LOADING, partial(manifest.read_text, directory))
    for _ in range(manifest.READS):
        text = read()
        agreement = Agreement(access.group, LOADING)
        try:
            return Loading(directory, text, model, access, agreement).run()
        except Exception:  # of any kind: has_failed is the same on all ranks, and decides what they do next
            if not agreement.has_failed or read() == text:
                raise
    manifest.fail_replaced(directory)


class Loading:
    """Loads one checkpoint into one model and optimizer. All ranks do this together."""

    def __init__(self, directory: Path, text: bytes, model: torch.nn.Module, access: CheckpointAccess, agreement: Agreement):
        self._access = access
        self._directory = directory
        self._model = model
        self._agreement = agreement
        self._parameters = parameters_by_name(model, access)
        self._names = parameter_names(model, access)
        self._buffers = buffers_by_name(model)
        with self._agreement.attempt():
            access.require_not_gathered("cannot load a checkpoint")
            require_all_partitioned(access, self._names)
            self._checkpoint = manifest.parse(directory, text)
            use_model_names(self._checkpoint, {**self._parameters, **self._buffers})
            self._files = manifest.data_files(directory, self._checkpoint)
            self._left = leave_out(self._checkpoint, self._parameters, self._buffers)
            require_compatible(self._checkpoint, access, self._parameters, self._buffers, self._names)
            require_expected(model, self._buffers.values())
            self._custom = CustomState(access, self._checkpoint.tensors, self._names)
            self._custom.require_stored()
            self._outer = OuterLoading(access, self._checkpoint.tensors, self._names)
            self._options = access.options_to_set([group["options"] for group in self._checkpoint.groups])
            self._extra = read_extra(directory, self._checkpoint, access.group.rank)
        self._agreement.settle()
        self._tensors = self._checkpoint.tensors
        warn_of_left(self._left, access)

    def run(self) -> Any:
        """Load the checkpoint, and return this rank's `extra`."""
        self._access.optimizer.zero_grad()
        with self._agreement.attempt():  # finds a missing or short file before anything changes
            _core.CheckpointReader(self._files, self._last_pieces())
        self._agreement.settle()
        set_options(self._access.optimizer.param_groups, self._options)
        frozen_state, thawed = (self._custom.frozen(), {}) if self._access.has_own_step else self._empty_moments()
        made = {id(parameter): self._tensors[name].steps for name, parameter in self._parameters.items()}
        expect(self._parameters.values())
        expect_buffers(self._model)
        buffers = buffers_by_name(self._model)
        self._buffers = {name: buffers[name] for name in self._buffers}
        partition = self._access.begin_from(made, self._checkpoint.step, frozen_state)
        moments = {} if self._access.has_own_step else {**frozen_state, **thawed}
        self._fill(partition, self._targets(partition, moments) + self._outer.targets(partition))
        if any(self._access.group.all_reduce([len(thawed)])):
            partition.write_moments(moments_by_kind(thawed, self._access))
        self._access.skipped = self._checkpoint.skipped
        self._access.finish_loading()
        known = checkpoints_in(self._access, self._directory)
        known.clear()
        known.add(self._checkpoint.folder)
        return self._extra

    def _last_pieces(self) -> list[tuple[int, int, int, int]]:
        """Return the last piece of each file."""
        last = {piece.file: piece for piece in manifest.pieces_by_file(list(self._tensors.values()))}
        return [(piece.file, piece.offset, piece.bytes, piece.seal) for piece in last.values()]

    def _empty_moments(self) -> tuple[State, State]:
        """Allocate the moments of parameters that were frozen when they were saved, or are frozen now. Return those
        that stay with frozen parameters, and those that return to parameters that are trained now."""
        frozen_state: State = {}
        thawed: State = {}
        for _, parameter in self._access.parameters():
            name = self._names[id(parameter)]
            if name not in self._tensors:
                continue
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

    def _targets(self, partition: Partition, moments: State) -> list[Target]:
        """Return the targets of the tensors that are not sharded. Each rank fills all of them."""
        partitioned = {id(member.parameter) for member in partition.all_members}
        targets: list[Target] = []
        for name, parameter in self._parameters.items():
            entry, own = self._tensors[name], moments.get(id(parameter), {})
            outside = None if id(parameter) in partitioned else plain(parameter)
            if entry.role != "trained":
                targets += [] if outside is None else [PlainTensor(name, entry, outside)]
                targets += [self._plain_moment(name, moment, own[moment]) for moment in own if moment != "step"]
            elif outside is not None or own:
                by_kind = {kind.name: own[moment] for kind, moment in self._access.names_of_moments() if moment in own}
                targets.append(TrainedTensor(name, entry, outside, by_kind))
        targets += [PlainTensor(name, self._tensors[name], buffer.data) for name, buffer in self._buffers.items()]
        return targets

    def _plain_moment(self, parameter: str, moment: str, into: torch.Tensor) -> Target:
        name = moment_name(parameter, moment)
        return PlainTensor(name, self._tensors[name], into)

    def _fill(self, partition: Partition, targets: list[Target]) -> None:
        """Read everything in this order: the optimizer's own state, which a run commits with the shards, the shards, and the
        rest."""
        parts = [(partition.member_of(part), part) for part in partition.local_shards()]
        parts = [(member, part) for member, part in parts if self._name_of(member) in self._tensors]
        own = self._custom.targets(partition)
        wanted = [cut for target in own for cut in cuts_of(target)]
        wanted += [cut for member, part in parts for cut, _ in self._cuts(member, part)]
        wanted += [cut for target in targets for cut in cuts_of(target)]
        with self._agreement.attempt():
            stream = Stream(self._files, (cut.piece for cut in wanted))
        self._agreement.settle()
        self._fill_targets(own, stream)
        with self._agreement.attempt():
            self._custom.install(partition)
        self._agreement.settle()

        def change(part: _core.StatePart) -> None:
            with self._agreement.attempt():
                if self._agreement.error is None:
                    self._change(part, partition.member_of(part), stream)

        partition.change_shards(change, self._checkpoint.step, self._agreement.settle)
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
        name, (first, count) = self._name_of(member), member.of_parameter(part.first, part.count)
        for cut in cover(self._tensors[name].pieces, first, count):
            yield cut, None
        for number, entry in [] if part.frozen else self._custom.stored(name):
            for cut in cover(entry.pieces, first, count):
                yield cut, number

    def _change(self, part: _core.StatePart, member: Member, stream: Stream) -> None:
        name = self._name_of(member)
        if name not in self._tensors:
            return
        entry, values = self._tensors[name], dict(self._custom.stored(name))
        kind, width = OPAQUE if member.is_opaque else entry.kind(), member.width
        for cut, number in self._cuts(member, part):
            reader = stream.go_to(cut.piece, name)
            if number is None:
                elements = (cut.piece.count * width, cut.first * width, cut.into * width, cut.count * width)
                reader.copy(kind, elements, part)
            else:
                take_values(reader, cut, getattr(torch, values[number].dtype), part.own(number))

    def _name_of(self, member: Member) -> str:
        return self._names[id(member.parameter)]


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


def read_extra(directory: Path, checkpoint: Checkpoint, rank: int) -> Any:
    """Return the extra of the rank with the same number; additional ranks start again with that of rank 0. Tensors are
    loaded to the host, because the GPU that they were on may not exist here."""
    number = rank % checkpoint.ranks
    path, content = manifest.read_extra(directory, checkpoint, number)
    return load_without_code(io.BytesIO(content), path)
