"""Make a partition: choose the stage and the tiers, group parameters into units, and begin the training. Then bring it the
state that is outside of partitions: the optimizer's, and shards of the last partition, with parameters as the fp32 values from
which they were rounded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import scripted_in, without_torch_function
from ballast.checks import refuse_order
from ballast.ranks import require_same
from ballast.schema import changed
from ballast.tiers import tier_of
from ballast.torch.calls.sharded_parameters import ShardedParameters
from ballast.torch.gpu import gpu_of_tensors, stream_on
from ballast.torch.memory import BYTES, return_freed_memory
from ballast.torch.parameters.deferred_parameters import DeferredParameters, drop, is_pending, make_unpartitioned, suspend
from ballast.torch.parameters.gathered_memory import gathered_memory_for
from ballast.torch.parameters.managed_parameter import is_without_values, managed, owner_of
from ballast.torch.parameters.overlapped_gathers import OverlappedGathers
from ballast.torch.parameters.parameter_memory import FullParameters, ParameterMemory
from ballast.torch.parameters.units import (
    Groups,
    ParameterUnit,
    UnitParameter,
    gpu_of,
    outside_of,
    refuse_outside,
    require_known,
    units_of,
    units_of_model,
)
from ballast.torch.process_groups import ProcessGroups, sum_in_fp32
from ballast.torch.training.autotune import PartitionRequest, machine_of_all_ranks, settled
from ballast.torch.training.joint_runs import JointRun
from ballast.torch.training.model_and_optimizer import ModelAndOptimizer
from ballast.torch.training.partition import Partition, StepInputs
from ballast.torch.training.preconditions import (
    describe,
    described,
    described_groups,
    require_own_memory,
    warn_of_formats,
    warn_of_frozen,
    warn_of_layout,
)
from ballast.torch.updates.rules import blocks_of, rules_of
from ballast.torch.updates.sharded_state import IN_LIBRARY, Rule, ShardedState, State, is_freed, read_of
from ballast.torch.updates.updates import Tiles, Updates, merged, steps_in
from ballast.wrap_options import WrapOptions, without_gpu


class Partitioner:
    """Makes partitions. It knows the groups of the last one, and the parameters that were outside of it."""

    def __init__(self, given: ModelAndOptimizer, ranks: ProcessGroups, updates: Updates, options: WrapOptions):
        self._given = given
        self.ranks = ranks
        self.updates = updates
        self._requested = self.options = options  # self.options has the chosen stage and tiers, from the first partition on
        self.groups = Groups()
        self.joint_run: JointRun | None = None  # the joint run, if the run is resumed with those of other optimizers
        self.outside: set[int] = set()  # ids of parameters that no module of the model has
        self._grouped: GroupedParameters | None = None  # the last partition's groups, as they were last found in the optimizer
        self._has_looked_at_options = False  # whether they have the effect that is meant
        self._may_resume = True  # false once the first partition is made
        self.has_resumed = False  # whether the last partition has the state of a run that has made steps

    def make(self, state: State, steps_before: int, *, is_loaded: bool) -> Partition:
        """Partition the parameters that are trained now. The count of steps continues that of the state, or
        `steps_before`; in a run that is resumed, that of the run."""
        self.updates.prepare(self._given.optimizer)
        require_same(self.ranks.data_group, described(self._given.optimizer, self._requested))
        self.ranks.data_group.require_same_parameters([*describe(self._given.trained(), self._given.names())])
        made = steps_in(state)
        steps = max([steps_before, *made.values()])
        members = self._members(made, steps)
        self.options = self._settled(members)
        self._requested = self._requested.with_formats(self.options.formats)  # a training keeps its formats
        units = self.units(members, self.options.stage)
        require_own_memory((member for unit in units for member in unit.members), self._given.model)
        warn_of_layout(self.ranks.data_group.rank, (member for unit in units for member in unit.members))
        self._look_at_options(members, units)
        if (model := self._given.model) is not None:
            partitioned = (member.parameter for unit in units for member in unit.members)
            make_unpartitioned(model, partitioned, self._given.keeps())
        gpu = self._gpu(members)
        options = self.options.for_training(gpu=gpu, stream=stream_on(gpu))
        options.set_join_notes(self.updates.join_metadata)
        if gpu is not None:
            options.set_rates(machine_of_all_ranks(self.ranks.data_group, self.options, members))
        self._given.share_exchanges(options)
        if self.joint_run is not None:
            self.joint_run.set_options(options)
        self.outside, self._grouped = outside_of(units, members), None
        partition = Partition(units, self.ranks, self._step_inputs(), options, partial(self._make_memory, options))
        with ExitStack() as undoing:
            undoing.callback(partition.release, together=False)
            self.has_resumed = self._may_resume and partition.core.found and partition.steps > 0
            if self.has_resumed:
                self.updates.resume_metadata(partition)
            else:
                self.updates.keep_metadata(partition, state)
                if steps > 0 or is_loaded:
                    partition.core.set_steps(steps)
            self._may_resume = False
            undoing.pop_all()
        return partition

    def _make_memory(self, options: _core.TrainingOptions, core: _core.Training, units: list[ParameterUnit]) -> ParameterMemory:
        if not self.options.keeps_full_parameters:
            memory = ShardedParameters(self._given.required_model, self.ranks.data_group, options, core, units)
            if self.options.tuning.keep_gathered is None:
                memory.gathered_memory = gathered_memory_for(core, self.ranks.data_group, self.options.memory, options.gpu)
            return memory
        overlaps = options.overlap_gathers
        gathers = OverlappedGathers(self._given.required_model, options, core, units) if overlaps else None
        return FullParameters(self.ranks.data_group, core, units, gathers)

    def _members(self, made: dict[int, int], steps: int) -> list[UnitParameter]:
        names = self._given.names()
        self.groups = Groups()
        groups = self._given.optimizer.param_groups
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(self._given.parameters())}
        members = []
        for place, parameter in self._given.trained():
            require_known(parameter, names[id(parameter)])
            members.append(
                UnitParameter(
                    parameter,
                    names[id(parameter)],
                    group=self.groups.number(place),
                    missed=steps - made.get(id(parameter), 0),
                    counted=self.ranks.counts(parameter),
                    number=numbers[id(parameter)],
                    blocks=blocks_of(groups[place], parameter),
                )
            )
        if not members:
            self.groups.number(0)  # the library needs a rule, which updates nothing
        return members

    def _settled(self, members: list[UnitParameter]) -> WrapOptions:
        [rule] = rules_of([(0, self._given.optimizer.param_groups[0])], self.updates.rule)
        requested = self._requested
        if (tuning := requested.tuning).overlap_gathers is None:  # a lone rank on a CPU gains nothing: its cores compute both
            has_lanes = self.ranks.data_group.size > 1 or self._gpu(members) is not None
            may_overlap = (has_lanes or requested.offload is not None) and self._can_wait()
            requested = changed(requested, tuning=changed(tuning, overlap_gathers=may_overlap))
        requested = without_gpu(requested) if self._gpu(members) is None else requested
        return settled(
            requested, PartitionRequest(self.ranks.data_group, rule, members, self._can_wait(), partial(self.units, members))
        )

    def _can_wait(self) -> bool:
        """Return whether uses of parameters can wait for them: the modules are known, and torch.jit has none of them."""
        return self._given.model is not None and scripted_in(self._given.model) is None

    def _look_at_options(self, members: list[UnitParameter], units: list[ParameterUnit]) -> None:
        if not members or self._has_looked_at_options:
            return
        self._has_looked_at_options = True
        warn_of_formats(self.ranks.data_group.rank, self.options.formats, members)
        offload = self._requested.offload
        if self.options.stage != 3 or not isinstance(offload, str) or self._requested.chooses_tiers:
            return
        if tier_of(offload) == "nvme" or self._gpu(members) is not None:
            warn_of_frozen(self.ranks.data_group.rank, offload, chain.from_iterable(unit.members for unit in units))

    def _gpu(self, members: list[UnitParameter]) -> int | None:
        """Return the GPU of the parameters that are trained, or of the optimizer's if none is."""
        return gpu_of(members) if members else gpu_of_tensors(each for _, each in self._given.parameters())

    def units(self, members: list[UnitParameter], stage: int | None) -> list[ParameterUnit]:
        if stage == 3:
            return units_of_model(self._given.required_model, members, self.options.tuning.units, self._given.shards())
        return units_of(members)

    def _step_inputs(self) -> StepInputs:
        # Methods that look the optimizer up at each call: a reference to it would keep it alive.
        gathers = not self.options.keeps_full_parameters and self.ranks.data_group.size > 1
        return StepInputs(
            described=lambda: described_groups(self._given.optimizer),
            rules=self.rules,
            custom_step=self._custom_step if self.updates.has_custom_step else None,
            joint_run=self.joint_run,
            is_alone=not self._given.siblings(),
            agreement=self._given.agreement() if gathers else None,
            calls_differ=self.options.tuning.calls_differ,
        )

    def rules(self) -> list[Rule]:
        """Return the rule of each of the library's groups, as the optimizer's groups are now."""
        groups = self._given.optimizer.param_groups
        return rules_of([(place, groups[place]) for place in self.groups.places], self.updates.rule)

    def _custom_step(self, shards: ShardedState, tiles: Tiles, factor: float, is_last: bool) -> None:
        self.updates.custom_step(self._given.optimizer, shards, tiles, factor, is_last)

    def trains_exactly(self, partition: Partition, trained: Sequence[tuple[int, torch.nn.Parameter]]) -> bool:
        """Return whether the partition has the parameters that are trained, and no others."""
        known = self.outside | {id(member.parameter) for member in partition.members}
        return known == {id(each) for _, each in trained}

    def has_groups(self, partition: Partition) -> bool:
        """Return whether the parameters of the partition are in the groups whose options its updates use."""
        groups = self._given.optimizer.param_groups
        if self._grouped is None or not self._grouped.are_in(groups):
            now, places = GroupedParameters(groups, partition), self.groups.places
            if any(now.places.get(id(member.parameter)) != places[member.group or 0] for member in partition.members):
                return False
            self._grouped = now
        return True

    def require_no_others(self) -> None:
        """Refuse gradients of parameters that no partition trains, or not the last one. Call it after has_groups()."""
        frozen = (each for _, each in self._given.parameters() if not each.requires_grad)
        others = frozen if self._grouped is None else self._grouped.others
        with without_torch_function():
            for each in [each for each in others if each.grad is not None]:
                self.leave_or_refuse(each)

    def leave_or_refuse(self, parameter: torch.nn.Parameter) -> None:
        """Leave the gradient of a parameter to torch if the optimizer does not have it. Refuse the gradient if the partition
        lacks the parameter for another reason."""
        if all(each is not parameter for _, each in self._given.parameters()):
            return
        name = self._given.names()[id(parameter)]
        if id(parameter) in self.outside:
            refuse_outside(name)
        if not parameter.requires_grad:
            needed = "requires_grad=True before the step, or parameter.grad = None"
            refuse_order("cannot make a step: a frozen parameter has a gradient", where=f"parameter {name}", needed=needed)
        refuse_order(
            "cannot take a gradient: the parameter is trained only since a later backward pass of this step",
            where=f"parameter {name}",
            needed="the same trained parameters in all backward passes of a step",
            remedy="Unfreeze or add it before the first backward pass of a step.",
        )


class GroupedParameters:
    """The parameters in an optimizer's groups. Each step compares them twice, so no Python code runs for each of them."""

    def __init__(self, groups: Sequence[dict[str, Any]], partition: Partition):
        self.places = {id(each): place for place, group in enumerate(groups) for each in group["params"]}
        in_groups = [*map(itemgetter("params"), groups)]
        self._counts = [*map(len, in_groups)]
        self._parameters: list[torch.nn.Parameter] = [*chain.from_iterable(in_groups)]
        self.others = [each for each in self._parameters if not partition.trains(each)]

    def are_in(self, groups: Sequence[dict[str, Any]]) -> bool:
        in_groups = [*map(itemgetter("params"), groups)]
        return [*map(len, in_groups)] == self._counts and all(map(is_, chain.from_iterable(in_groups), self._parameters))


log = logging.getLogger("ballast")


# --- State outside of partitions ---


class OptimizerState:
    """Holds the state outside a partition, and shows all state in optimizer.state."""

    def __init__(self, given: ModelAndOptimizer, updates: Updates):
        self._given = given
        self._updates = updates
        self.is_loaded = False  # optimizer.state has the state for the next partition
        self._shards: State = {}  # what it shows in the place of IN_LIBRARY
        self.frozen_state: State = {}  # the state of parameters that are frozen now
        self._unbegun: State | None = None  # state that could not be written to the partition yet

    def load(self, state: State, shards: State | None = None) -> None:
        """Keep state for the partition of the next step: full state, or this rank's shard. It is in optimizer.state, where the
        user may change it until then, and shows `shards` in the place of IN_LIBRARY."""
        read = read_of(state)
        self.is_loaded, self._unbegun, self._shards = True, None, shards or {}
        self.show(merged(read, self._shards) if shards else read)

    @property
    def loaded(self) -> State | None:
        """The state for the next partition as it is now, or None."""
        if not self.is_loaded or (optimizer := self._given.optimizer_if_alive) is None:
            return None
        shown = optimizer.state
        now = {id(each): shown[each] for _, each in self._given.parameters() if each in shown}
        for key, shards in self._shards.items():
            values = now.get(key, {})
            now[key] = {name: IN_LIBRARY if shards.get(name) is value else value for name, value in values.items()}
        return read_of(now)

    def load_changed(self, changed: State | None) -> None:
        """Load optimizer.state if the user has removed or replaced something in it: the updates have returned it then."""
        if not self.is_loaded and changed is not None:
            self.load(changed)

    def without_unbegun(self, numbered: State, partition: Partition | None) -> State:
        """Return the state of a state_dict(), by number of the parameter, without those that have no state in torch yet."""
        left = set() if partition is None else {id(each) for each in self._updates.unbegun(partition)}
        numbers = {number for number, (_, each) in enumerate(self._given.parameters()) if id(each) in left}
        return {number: values for number, values in numbered.items() if number not in numbers}

    def is_unbegun(self, partition: Partition) -> bool:
        """Return whether no parameter has state in torch yet."""
        return not self.frozen_state and len(self._updates.unbegun(partition)) == len(partition.members)

    @property
    def steps_of_loaded(self) -> int | None:
        return None if (loaded := self.loaded) is None else max(steps_in(loaded).values(), default=0)

    def take_out(self, partition: Partition) -> State:
        """Return the full state outside the partition's memory, on every rank."""
        return {**self.frozen_state, **self._updates.take_out(self._given.optimizer, partition)}

    # --- Into a partition ---

    def begin(self, partition: Partition, state: State) -> None:
        """Write the state to the partition. State of parameters that it does not have stays here, in `frozen_state`."""
        self._unbegun = state
        now = {id(member.parameter) for member in partition.members}
        self.frozen_state = {key: values for key, values in state.items() if key not in now}
        self.show(self.frozen_state)
        self._updates.begin(self._given.optimizer, partition, state)
        self._unbegun = None

    def without_resumed(self, partition: Partition, state: State, run: str) -> State:
        """Return the state that the optimizer had when it was wrapped, without that of parameters of the run: its records
        have newer state of them."""
        trained = {id(member.parameter) for member in partition.members}
        steps = max((count for key, count in steps_in(state).items() if key in trained), default=0)
        if steps > 0 and partition.ranks.rank == 0:
            log.warning(
                'run "%s" resumes after step %d, and leaves out the optimizer\'s state of step %d from before ballast.wrap()',
                run,
                partition.steps,
                steps,
            )
        return {key: values for key, values in state.items() if key not in trained}

    def begin_again(self, partition: Partition) -> None:
        """Write state again that could not be written."""
        if self._unbegun is not None:
            self.begin(partition, self._unbegun)

    def forget(self) -> None:
        """Forget loaded state: a checkpoint brings other state."""
        if self.is_loaded:
            self.show({})
        self.is_loaded, self._unbegun = False, None

    def show(self, state: State) -> None:
        optimizer = self._given.optimizer
        optimizer.state.clear()
        for _, parameter in self._given.parameters():
            if id(parameter) in state:
                optimizer.state[parameter] = state[id(parameter)]

    def forget_partition(self) -> None:
        """Forget the partition, which ends: entries of optimizer.state would read from it and keep it alive."""
        self._updates.forget_partition()
        if (optimizer := self._given.optimizer_if_alive) is not None:
            optimizer.state.clear()


Kind = _core.Moment | None  # None is the parameter itself
CUSTOM = [_core.Moment[f"custom_{number}"] for number in range(_core.MAX_CUSTOM_VALUES)]


@dataclass
class Shard:
    """This rank's range of a parameter's elements, with values in fp32; of an opaque parameter, a range of its bytes. All ranks
    have values of the same kinds."""

    parameter: torch.nn.Parameter
    is_opaque: bool
    first: int
    count: int
    values: dict[Kind, torch.Tensor]
    version: int = 0  # torch's count of writes to the parameter's memory

    @property
    def elements(self) -> int:
        """The elements, or the bytes, of the whole parameter."""
        return int(self.parameter.numel()) * (self.parameter.dtype.itemsize if self.is_opaque else 1)

    def keep(self, kinds: Iterable[Kind]) -> None:
        """Keep the values of these kinds, and forget others."""
        self.values = {kind: self.values[kind] for kind in kinds}

    def has(self, part: _core.StatePart) -> bool:
        return self.first <= part.first < self.first + self.count

    def part(self, like: _core.StatePart, kinds: Iterable[Kind]) -> _core.StatePart:
        """Show the values of these kinds in the range of a part of a training to the library."""
        at = {kind: self.values[kind][like.first - self.first :].data_ptr() for kind in kinds}
        return _core.StatePart(
            dtype=_core.DType.u8 if self.is_opaque else _core.DType.fp32,
            parameter=at.get(None, 0),
            momentum=at.get(_core.Moment.momentum, 0),
            variance=at.get(_core.Moment.variance, 0),
            own=_places([at[moment] for moment in CUSTOM if moment in at]),
            count=like.count,
        )


def _places(at: Sequence[int]) -> tuple[int, int, int]:
    """Return where the optimizer's own values begin, the elements from one to the next, and their number."""
    if not at:
        return 0, 0, 0
    return at[0], (at[1] - at[0]) // 4 if len(at) > 1 else 0, len(at)


def memory_of(kinds: Iterable[Kind], count: int, *, is_opaque: bool) -> dict[Kind, torch.Tensor]:
    """Allocate values by kind. The optimizer's own values lie at equal distances, as the library takes them."""
    kinds = [*kinds]
    if is_opaque:
        return {kind: torch.empty(count, dtype=BYTES, device="cpu") for kind in kinds}
    own = iter(torch.empty(sum(kind in CUSTOM for kind in kinds), count, dtype=torch.float32, device="cpu"))
    return {kind: next(own) if kind in CUSTOM else torch.empty(count, dtype=torch.float32, device="cpu") for kind in kinds}


class StateMigration:
    """The shards of a partition that has ended, or nothing. A rank has its own shards, and at times one full tensor.

    All ranks call all methods together. In stage 3 only this object has the values of parameters between two partitions:
    they are PENDING, and `owner` owns them until they are handed over.
    """

    def __init__(
        self,
        partition: Partition | None = None,
        moments: Sequence[tuple[_core.Moment, str]] = (),
        owner: DeferredParameters | None = None,
    ):
        self._groups = None if partition is None or partition.sharing is None else partition.groups
        self._names = dict(moments)
        self._owner = owner
        self._is_lost = False
        self._taken: dict[int, Shard] = {}  # by id of the parameter
        if partition is not None:
            self._take(partition)

    def _take(self, partition: Partition) -> None:
        for member in partition.all_members:
            kinds: list[Kind] = [None] if member.group is None else [None, *self._names]
            first, count = partition.part(member)
            values = memory_of(kinds, count, is_opaque=member.is_opaque)
            self._taken[id(member.parameter)] = Shard(member.parameter, member.is_opaque, first, count, values)

        def take(part: _core.StatePart) -> None:
            taken = self._taken[id(partition.member_of(part).parameter)]
            assert taken.has(part)
            taken.part(part, taken.values).copy_from(part)

        partition.visit_shards(take)

    def suspend_all(self) -> None:
        """Make the parameters PENDING: their partition is gone, or the next one could not be made."""
        for taken in self._taken.values():
            if self._owner is not None and None in taken.values:
                suspend(taken.parameter, self._owner)
            taken.version = taken.parameter._version

    def _is_written(self, taken: Shard) -> bool:
        """Return whether the parameter was written to since suspend_all(), or is read from files."""
        if self._owner is not None:
            return not is_pending(taken.parameter)
        return bool(taken.parameter._version != taken.version)

    def forget_moments(self) -> None:
        for taken in self._taken.values():
            taken.keep(kind for kind in taken.values if kind is None)

    def begin_again(self) -> None:
        """Begin with a checkpoint, which has all moments, and values that were lost."""
        if self._is_lost:
            self._taken, self._is_lost = {}, False
        self.forget_moments()

    def take_moments(self, *, except_for: Collection[int]) -> State:
        """Return the full moments of the parameters that are not in `except_for`: they are not trained any more. Keep
        nothing else of them, except values that only this object has."""
        state: State = {}
        left = {key: taken for key, taken in self._taken.items() if key not in except_for}
        for key, taken in left.items():
            state[key] = {name: self._full(taken, kind) for kind, name in self._names.items() if kind in taken.values}
        for key, taken in left.items():
            taken.keep(kind for kind in taken.values if kind is None)
            if self._owner is None:
                del self._taken[key]
        return state

    # --- To the next partition ---

    def hand_over(self, make: Callable[[], Partition], parameters: Callable[[], Iterable[torch.nn.Parameter]]) -> Partition:
        """Make a partition, and write the shards to it before other state. State that is missing here becomes zero
        there. Parameters that are in no partition any more return to torch's memory. If the partition cannot be made, some of
        all `parameters` may have lost their values, because they move to it one unit after the other."""
        if self._is_lost:
            refuse_order(
                "cannot continue to train: values were lost on the way from one partition to another",
                needed="ballast.load_checkpoint(), after the cause of the failure is removed",
            )
        for taken in self._taken.values():
            if self._is_written(taken):
                taken.keep(kind for kind in taken.values if kind is not None)
        owners = {id(each): owner_of(each) for each in parameters()}
        try:
            partition = make()
        except BaseException:
            self.suspend_all()
            others = [each for each in parameters() if id(each) not in self._taken]
            self._is_lost = any(is_freed(each) or owner_of(each) is not owners[id(each)] for each in others)
            raise
        try:
            self._write_to(partition)
            self.return_to_torch()
        except BaseException:
            self._is_lost = True
            partition.release(together=False)
            self._drop_values([member.parameter for member in partition.all_members])
            raise
        return partition

    def _write_to(self, partition: Partition) -> None:
        members = {id(member.parameter): member for member in partition.all_members if id(member.parameter) in self._taken}
        written = {key for key in members if None not in self._taken[key].values}  # there the partition has newer values
        local = {key: self._cut(self._taken[key], *partition.part(member)) for key, member in members.items()}

        def change(part: _core.StatePart) -> None:
            shard = local.get(id(partition.member_of(part).parameter))
            if shard is None or not shard.has(part):
                return
            if id(shard.parameter) in written:
                shard.part(part, [None]).copy_from(part)
            part.copy_from(shard.part(part, shard.values))

        if local:  # the same on all ranks
            partition.move_shards(change)
        self._taken = {key: taken for key, taken in self._taken.items() if key not in local}

    def _cut(self, taken: Shard, first: int, count: int) -> Shard:
        """Return the shard of another partition, with room for the parameter's values."""
        values = memory_of({None: None, **taken.values}, count, is_opaque=taken.is_opaque)
        for kind in taken.values:
            values[kind].copy_(self._flat(taken, kind)[first : first + count])
        taken.values = {}
        return_freed_memory()  # small and large blocks in turn leave holes in the heap
        return Shard(taken.parameter, taken.is_opaque, first, count, values)

    def _drop_values(self, partitioned: list[torch.nn.Parameter]) -> None:
        if self._owner is not None:
            left = [taken.parameter for taken in self._taken.values() if is_without_values(taken.parameter)]
            for parameter in partitioned + left:
                suspend(parameter, self._owner)
                drop(parameter)

    def return_to_torch(self) -> None:
        """Return the rest of the parameters to torch's memory, if they are not there already."""
        if self._owner is None or self._is_lost:
            return
        for taken in self._taken.values():
            if None not in taken.values:
                continue
            parameter = taken.parameter
            full = self._full(taken, None).to(parameter.device)
            full = full if taken.is_opaque else full.to(parameter.dtype)
            if (found := managed(parameter)) is not None:
                found.release(full)
            else:  # no optimizer shards it any more, so that the next partition has given it memory of torch
                parameter.data.copy_(full)
        self._taken = {}

    def _full(self, taken: Shard, kind: Kind) -> torch.Tensor:
        """Return all values, in the shape of the parameter."""
        flat = self._flat(taken, kind)
        return (flat.view(taken.parameter.dtype) if taken.is_opaque else flat).view(taken.parameter.shape)

    def _flat(self, taken: Shard, kind: Kind) -> torch.Tensor:
        """Return all values, or all bytes. The sum begins with -0.0, which changes no value; 0.0 would change -0.0. In fp32
        each byte is exact."""
        mine = torch.full((taken.elements,), -0.0, dtype=torch.float32, device="cpu")
        mine[taken.first : taken.first + taken.count] = taken.values[kind]
        total = sum_in_fp32(None if self._groups is None else self._groups.sharing(taken.parameter), mine)
        return total.to(BYTES) if taken.is_opaque else total

    # --- Between two partitions ---

    def shown(self) -> State:
        """Return moments as optimizer.state has them: full if this rank has all of them, else its shard,
        one-dimensional."""
        return {
            key: {name: _shown(taken, kind) for kind, name in self._names.items() if kind in taken.values}
            for key, taken in self._taken.items()
        }


def _shown(taken: Shard, moment: _core.Moment) -> torch.Tensor:
    local = taken.values[moment]
    return local.view(taken.parameter.shape) if local.numel() == taken.parameter.numel() else local
