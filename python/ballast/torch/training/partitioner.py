"""Make a partition: choose the stage and the tiers, group parameters into units, and begin the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch

from ballast import _core
from ballast._torch_compat import without_torch_function
from ballast.tiers import tier_of
from ballast.torch.calls.sharded_parameters import ShardedParameters
from ballast.torch.gpu import gpu_of_tensors, stream_on
from ballast.torch.parameters.deferred_parameters import make_unpartitioned
from ballast.torch.parameters.overlapped_gathers import OverlappedGathers
from ballast.torch.parameters.parameter_memory import FullParameters, ParameterMemory
from ballast.torch.parameters.units import (
    Groups,
    ParameterUnit,
    UnitParameter,
    gpu_of,
    outside_of,
    require_known,
    units_of,
    units_of_model,
)
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.training.autotune import PartitionRequest, settled
from ballast.torch.training.joint_runs import JointRun
from ballast.torch.training.model_and_optimizer import ModelAndOptimizer
from ballast.torch.training.partition import Partition, StepInputs
from ballast.torch.training.preconditions import (
    describe,
    described,
    described_groups,
    require_own_memory,
    require_same,
    require_same_parameters,
    warn_of_formats,
    warn_of_frozen,
    warn_of_layout,
)
from ballast.torch.updates.rules import blocks_of, rules_of
from ballast.torch.updates.sharded_state import ShardedState, State
from ballast.torch.updates.updates import StepCall, Updates, steps_in
from ballast.wrap_options import WrapOptions, without_gpu


class Partitioner:
    """Makes partitions. It knows the groups of the last one, and the parameters that were outside of it."""

    def __init__(self, given: ModelAndOptimizer, ranks: ProcessGroups, updates: Updates, options: WrapOptions):
        self._given = given
        self.ranks = ranks
        self.updates = updates
        self._requested = self.options = options  # with the chosen stage and tiers, from the first partition on
        self.groups = Groups()
        self.joint_run: JointRun | None = None  # if the run is resumed with those of other optimizers
        self.outside: set[int] = set()  # ids of parameters that no module of the model has
        self._grouped: GroupedParameters | None = None  # when the groups of the last partition were last found in the optimizer
        self._has_looked_at_options = False  # whether they have the effect that is meant
        self._may_resume = True  # until the first partition is made
        self.has_resumed = False  # whether the last partition has the state of a run that has made steps

    def make(self, state: State, steps_before: int, *, is_loaded: bool) -> Partition:
        """Partition the parameters that are trained now. The count of steps continues that of the state, or
        `steps_before`; in a run that is resumed, that of the run."""
        self.updates.prepare(self._given.optimizer)
        require_same(self.ranks.of_data, described(self._given.optimizer, self._requested))
        require_same_parameters(self.ranks.of_data, [*describe(self._given.trained(), self._given.names())])
        made = steps_in(state)
        steps = max([steps_before, *made.values()])
        members = self._members(made, steps)
        self.options = self._settled(members)
        self._requested = self._requested.with_formats(self.options.formats)  # a training keeps its formats
        units = self.units(members, self.options.stage)
        require_own_memory((member for unit in units for member in unit.members), self._given.model)
        warn_of_layout(self.ranks.of_data.rank, (member for unit in units for member in unit.members))
        self._look_at_options(members, units)
        if (model := self._given.model) is not None:
            partitioned = (member.parameter for unit in units for member in unit.members)
            make_unpartitioned(model, partitioned, self._given.keeps())
        gpu = self._gpu(members)
        options = self.options.for_training(gpu=gpu, stream=stream_on(gpu))
        options.set_join_notes(self.updates.join_metadata)
        self._given.share_exchanges(options)
        if self.joint_run is not None:
            self.joint_run.set_options(options)
        self.outside, self._grouped = outside_of(units, members), None
        partition = Partition(units, self.ranks, self.step_inputs, options, partial(self._make_memory, options))
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
            return ShardedParameters(self._given.required_model, self.ranks.of_data, options, core, units)
        overlaps = options.overlap_gathers
        gathers = OverlappedGathers(self._given.required_model, options, core, units) if overlaps else None
        return FullParameters(self.ranks.of_data, core, units, gathers)

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
        requested = without_gpu(self._requested) if self._gpu(members) is None else self._requested
        has_model = self._given.model is not None
        return settled(requested, PartitionRequest(self.ranks.of_data, rule, members, has_model, partial(self.units, members)))

    def _look_at_options(self, members: list[UnitParameter], units: list[ParameterUnit]) -> None:
        if not members or self._has_looked_at_options:
            return
        self._has_looked_at_options = True
        warn_of_formats(self.ranks.of_data.rank, self.options.formats, members)
        offload = self._requested.tier_without_kinds
        is_away = offload is not None and (tier_of(offload) == "nvme" or self._gpu(members) is not None)
        if offload is not None and is_away and self.options.stage == 3:
            warn_of_frozen(self.ranks.of_data.rank, offload, chain.from_iterable(unit.members for unit in units))

    def _gpu(self, members: list[UnitParameter]) -> int | None:
        """Return the GPU of the parameters that are trained, or of the optimizer's if none is."""
        return gpu_of(members) if members else gpu_of_tensors(each for _, each in self._given.parameters())

    def units(self, members: list[UnitParameter], stage: int | None) -> list[ParameterUnit]:
        if stage == 3:
            return units_of_model(self._given.required_model, members, self.options.tuning.units, self._given.shards())
        return units_of(members)

    def step_inputs(self) -> StepInputs:
        """Return the inputs of the next step, from the optimizer's groups as they are now."""
        groups = self._given.optimizer.param_groups
        return StepInputs(
            described=self._described_groups,
            rules=rules_of([(place, groups[place]) for place in self.groups.places], self.updates.rule),
            max_norm=self.options.max_norm,
            custom_step=self._bound_custom_step if self.updates.has_custom_step else None,
            joint_run=self.joint_run,
            is_alone=self._is_alone,
            agreement=None if self.options.keeps_full_parameters or self.ranks.of_data.size == 1 else self._given.agreement(),
            calls_differ=self.options.tuning.calls_differ,
        )

    def _is_alone(self) -> bool:
        return not self._given.siblings()

    def _described_groups(self) -> dict[str, str]:
        return described_groups(self._given.optimizer)  # looked up at each call: a reference would keep it alive

    def _bound_custom_step(
        self, shards: ShardedState, tiles: Sequence[_core.TileToUpdate], factor: float, is_last: bool
    ) -> None:
        self.updates.custom_step(self._given.optimizer, shards, StepCall(tiles, factor, is_last))

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

    def added(self) -> list[torch.nn.Parameter]:
        """Return the parameters that the last partition does not train and that have a gradient. Call it after has_groups()."""
        others = () if self._grouped is None else self._grouped.others
        with without_torch_function():
            return [each for each in others if each.requires_grad and each.grad is not None]


class GroupedParameters:
    """The parameters in an optimizer's groups. Each step compares them twice, so no Python code runs for each of them."""

    def __init__(self, groups: Sequence[dict[str, Any]], partition: Partition):
        self.places = {id(each): place for place, group in enumerate(groups) for each in group["params"]}
        self._counts = _counts_in(groups)
        self._parameters = [*_parameters_in(groups)]
        self.others = [each for each in self._parameters if not partition.trains(each)]

    def are_in(self, groups: Sequence[dict[str, Any]]) -> bool:
        return _counts_in(groups) == self._counts and all(map(is_, _parameters_in(groups), self._parameters))


def _counts_in(groups: Sequence[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _parameters_in(groups: Sequence[dict[str, Any]]) -> Iterator[torch.nn.Parameter]:
    return chain.from_iterable(group["params"] for group in groups)
