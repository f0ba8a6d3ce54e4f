"""Stage 3: parameters are gathered unit by unit, wherever torch uses them, and stay full inside blocks of gather()."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import is_recomputing, without_torch_function
from ballast.agreement import failed_ranks
from ballast.checks import fail, refuse, refuse_order
from ballast.connecting import Group
from ballast.torch.calls.hooks import ModuleHook
from ballast.torch.calls.module_calls import CompiledBlocks, EndOfCall, SavedTensors
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.managed_parameter import Lifecycle
from ballast.torch.parameters.parameter_memory import ParameterMemory
from ballast.torch.parameters.placeholder import kind_of, plain, require_no_cast
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.parameters.unit_gather import UnitGather
from ballast.torch.parameters.units import ParameterUnit, UnitParameter
from ballast.torch.parameters.writes import LOST_WRITE, Slots, Snapshot, agree_on_writes, refuse_lost_writes

log = logging.getLogger("ballast")

MOST_COPIED = 4 << 20  # bytes of a parameter that is copied so that views of it stay as they are


def is_small(parameter: torch.Tensor) -> bool:
    with without_torch_function():
        return bool(parameter.nbytes <= MOST_COPIED)


class ShardedParameters(ParameterMemory):
    """The owner of sharded parameters. Modules open a unit before they run; operations outside of modules, and blocks
    of gather(), open what they use. Writes are kept when a block of gather() ends."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        options: _core.TrainingOptions,
        core: _core.Training,
        units: Sequence[ParameterUnit],
    ):
        self.group = group
        self._core = core
        self._model = weakref.ref(model)
        self._gather = UnitGather(core, units, options, warns=group.rank == 0)
        loose = self._loose_members(model)
        self._gather.copy_where_open(member for member in loose if is_small(member.parameter))
        self._saved = SavedTensors(self._gather, {member.unit for member in loose})
        self._compiled = CompiledBlocks(model, self._gather.members)
        self._hooks = [hook for module in model.modules() if self._is_watched(module) for hook in self._watch(module)]
        self._compiled.watch(self._saved.beginning_with, self._saved.end_call)
        self._gather.take(self)
        keep_packing(model, warns=group.rank == 0)

    # --- As the owner of parameters ---

    @property
    def lifecycle(self) -> Lifecycle:
        return self._gather.lifecycle

    def begin(self) -> None:
        """Do nothing: training has begun."""

    @contextmanager
    def using(
        self, parameters: Sequence[torch.nn.Parameter], operation: str, *, again: bool = False, copied: bool = False
    ) -> Iterator[None]:
        """Gather parameters that one operation uses, outside the calls of their modules. Those of all units but the
        last are copies inside the block. All of them are copies if they are `copied`, because the result is a view, and other
        units may be opened before it is used; but only small ones. A recomputation outside of calls gets copies too: autograd
        saves its parameters without the hooks of this training, or before other units are opened."""
        members = [self._gather.member_of(parameter) for parameter in parameters]
        self._gather.require_there(members[0])
        recomputes = not self._saved.is_in_call and is_recomputing()
        is_refused = not (again or recomputes or self._saved.is_in_call)
        if is_refused and not all(self._gather.is_gathered(member) for member in members):
            require_no_cast(operation, members[0].name, why="training has begun, and ranks keep shards of it")
            refuse_order(
                "cannot use a parameter: its values are partitioned over ranks",
                where=f"parameter {members[0].name}",
                needed="with ballast.gather(model): ...",
            )
        units = list(dict.fromkeys(member.unit for member in members if member.unit not in self._gather.full))
        copied = copied and all(is_small(parameter) for parameter in parameters)
        copies_all = recomputes or copied
        first_in_place = len(units) if copies_all else max(len(units) - 1, 0)
        copies = {
            member: self._gather.copy_out(member)
            for unit in units[:first_in_place]
            for member in self._gather.opened(unit)
            if member in members
        }
        if copies_all:
            self._gather.release_unit()
        for unit in units[first_in_place:]:
            self._gather.open(unit)
        for member, values in copies.items():
            self._gather.show(member, values)
        try:
            with self._saved.watching() if recomputes else nullcontext():
                yield
        finally:
            written = self._gather.reshard(copies)
        if copied:
            self._gather.expect_no_writes(copies)
        if written:
            refuse_lost_writes(written)

    # --- Blocks of gather() ---

    @contextmanager
    def gathered(self, parameters: Sequence[torch.nn.Parameter], *, keeps_writes: bool = True) -> Iterator[None]:
        """Hold copies of these parameters full inside the block, and keep writes to them. All ranks enter and leave it
        together."""
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
        failed = failed_ranks(self.group, has_failed)
        if len(failed) in (0, self.group.size):
            return True
        if not has_failed:
            what = "cannot keep writes of a block of ballast.gather(): the block failed on other ranks"
            fail("peer_failed", _core.Problem(what=what, where=f"rank {', '.join(map(str, failed))}"))
        return False

    def _keep_writes(self, snapshots: Mapping[UnitParameter, Snapshot], slots: Slots) -> None:
        mine = [member for member, snapshot in snapshots.items() if snapshot.differs(member.parameter)]
        before = {member: snapshot.values for member, snapshot in snapshots.items()}
        written = agree_on_writes(self.group, before, mine, slots.require_unchanged)
        if not written:
            return
        gather = self._gather
        kept = {(member.unit, member.tensor): plain(member.parameter).to("cpu").contiguous().view(-1) for member in written}

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

    # --- Modules ---

    def _unit_of(self, module: torch.nn.Module) -> int | None:
        """Return the unit of the module's own parameters, if this optimizer keeps any of them."""
        members = self._gather.members
        own = next((each for each in module.parameters(recurse=False) if id(each) in members), None)
        return None if own is None else self._gather.member_of(own).unit

    def _loose_members(self, model: torch.nn.Module) -> set[UnitParameter]:
        """Return parameters that a module has apart from those of modules in it. Between two uses of them, or of views of them,
        its forward may call those modules. If a method of the module is checkpointed, the recomputation uses them between
        calls of other units, and outside of the module's own call."""
        found: set[UnitParameter] = set()
        for module in model.modules():
            own, inside = (
                {self._gather.member_of(each) for each in module.parameters(recurse) if id(each) in self._gather.members}
                for recurse in (False, True)
            )
            found |= own if {each.unit for each in own} < {each.unit for each in inside} else set()
        return found

    def _watch(self, module: torch.nn.Module) -> list[Any]:
        begin = ModuleHook(self._saved.beginning_with(self._unit_of(module)))
        end = EndOfCall(self._saved.end_call, self._gather)
        begin.cuts_graphs = end.cuts_graphs = not self._compiled.has(module)
        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]

    def on_module_call(self, module: torch.nn.Module) -> None:
        if self._is_watched(module):
            self._saved.beginning_with(self._unit_of(module))(module)

    def _is_watched(self, module: torch.nn.Module) -> bool:
        return module is self._model() or self._unit_of(module) is not None

    # --- As the memory of a partition ---

    def release_unit(self) -> None:
        self._gather.release_unit()

    def tell_of_calls(self, tell: Callable[[torch.nn.Module], None] | None) -> None:
        self._gather.on_call_between_steps = tell

    def watch_gathers(
        self, before: weakref.WeakMethod[Callable[[int, bool], None]], after_call: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        self._gather.before_gather, self._gather.after_call = before, after_call

    def after_step(self, *, updated: bool) -> None:
        """Forget calls that were interrupted. Updates continue while the next forward pass begins."""
        self._saved.end_all_calls()
        if updated:
            self._gather.count_update()

    def after_load(self) -> None:
        self._gather.count_writes(self._gather.members.values())

    def require_offloadable(self, parameters: bool) -> None:
        if not parameters:
            refuse(
                "cannot leave parameters on the device: stage 3 gathers them into memory that is freed too",
                needed="offload() of all, or a stage below 3",
            )

    def require_not_gathered(self, what: str) -> None:
        if self._gather.full:
            refuse_order(
                f"{what}: parameters are gathered",
                where=f"parameter {self._gather.units[min(self._gather.full)].members[0].name}",
                needed="the same outside of `with ballast.gather(...)`",
            )

    def offload(self) -> None:
        self._gather.offload(self)

    def reload(self) -> None:
        self._gather.reload()

    def release(self, together: bool, gathers: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        self._compiled.remove()
        if written := self._gather.close_unit():
            log.warning("%s: parameter %s", LOST_WRITE, ", ".join(written))
        if together and gathers and not self._gather.are_collected():
            self._gather.release_values()
        self._saved.end_all_calls()
        self._gather.end(Lifecycle.CLOSED if together else Lifecycle.LOST)
        del self._core  # so that its memory can be freed


def keep_packing(model: torch.nn.Module, *, warns: bool) -> None:
    """Keep modules from packing their weights anew in an evaluation on a CPU: the parameter would change outside of its
    memory. Warn of modules that keep a copy of their weights."""
    copies = None
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
        weight = module._parameters.get("weight")  # an attribute may be computed: torch's parametrizations do that
        if weight is not None and kind_of(weight).__name__ == "Int8Params":
            copies = copies or name
    if copies is not None and warns:
        log.warning(
            "module %s keeps a full copy of its 8-bit weights, as all of bitsandbytes' 8-bit modules do: stage 3 saves no "
            "memory there. Those of 4 bits are partitioned.",
            copies,
        )
