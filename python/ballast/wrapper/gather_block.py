"""Blocks of gather() in stage 3: parameters are full copies inside, and writes to them are kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ballast import _core
from ballast.agreement import failed_ranks
from ballast.checks import fail
from ballast.connecting import Group
from ballast.wrapper.memory import tensor_at
from ballast.wrapper.saved_tensors import SavedTensors
from ballast.wrapper.stored_tensor import StoredTensor
from ballast.wrapper.ungathered import plain
from ballast.wrapper.unit_gather import UnitGather
from ballast.wrapper.units import Member
from ballast.wrapper.writes import Slots, Snapshot, agree_on_writes


class GatherBlocks:
    """Opens the blocks. All ranks enter and leave a block together."""

    def __init__(
        self,
        model: weakref.ref[torch.nn.Module],
        group: Group,
        core: _core.Training,
        gather: UnitGather,
        saved: SavedTensors,
    ):
        self._model = model
        self._group = group
        self._core = core
        self._gather = gather
        self._saved = saved

    @contextmanager
    def gathered(self, parameters: Sequence[torch.nn.Parameter], keeps_writes: bool) -> Iterator[None]:
        gather = self._gather
        slots = Slots(self._model(), parameters)
        units = sorted({gather.member_of(parameter).unit for parameter in parameters} - gather.full)
        copies = gather.copies_of(units)
        gather.release_unit()
        gather.hold(units, copies)
        snapshots = {member: Snapshot(member.parameter) for member in copies} if keeps_writes else {}
        has_failed = False
        try:
            with self._saved.watching():
                yield
        except BaseException:
            has_failed = True
            raise
        finally:
            try:
                if keeps_writes and self._agree_to_keep(has_failed):
                    with gather.in_stream():  # a program may leave the block in another stream
                        self._keep_writes(snapshots, slots)
            finally:
                gather.let_go(units, copies)

    def _agree_to_keep(self, has_failed: bool) -> bool:
        """Return whether the block has ended in the same way on all ranks. Raise where it failed on other ranks only."""
        failed = failed_ranks(self._group, has_failed)
        if len(failed) in (0, self._group.size):
            return True
        if not has_failed:
            what = "cannot keep writes of a block of ballast.gather(): the block failed on other ranks"
            fail("peer_failed", _core.Problem(what=what, where=f"rank {', '.join(map(str, failed))}"))
        return False

    def _keep_writes(self, snapshots: Mapping[Member, Snapshot], slots: Slots) -> None:
        mine = [member for member, snapshot in snapshots.items() if snapshot.differs(member.parameter)]
        before = {member: snapshot.values for member, snapshot in snapshots.items()}
        written = agree_on_writes(self._group, before, mine, slots.require_unchanged)
        if not written:
            return
        gather = self._gather
        kept = {
            (member.unit, member.tensor): plain(member.parameter).to("cpu").contiguous().view(-1) for member in written
        }

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            values = kept.get((unit, tensor))
            if values is not None:
                first, count = gather.units[unit].members[tensor].of_parameter(first, count)
                tensor_at(into, count, values.dtype).copy_(values[first : first + count])
            return values is not None

        gather.count_writes(gather.counted_writes())
        self._core.write_parameters(fill)

    def write(self, values: Mapping[torch.nn.Parameter, StoredTensor]) -> None:
        """Read files into the shards, and into the copies of a block. All ranks call it together."""
        self._gather.release_unit()
        stored, written = {}, []
        for parameter, each in values.items():
            member = self._gather.member_of(parameter)
            if member.unit in self._gather.full:
                parameter.detach().copy_(each.read_all())
            else:
                stored[member.unit, member.tensor] = each
                written.append(member)
        self._gather.count_writes(written)

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            found = stored.get((unit, tensor))
            if found is not None:
                found.read(*self._gather.units[unit].members[tensor].of_parameter(first, count), into)
            return found is not None

        self._core.write_parameters(fill)

    def end(self) -> None:
        """Drop the reference to the training, so that its memory can be freed."""
        del self._core
