"""What stands behind a wrapped optimizer."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ballast import _core
from ballast.checks import refuse_order
from ballast.wrapper import entering
from ballast.wrapper.choosing import Training, settled
from ballast.wrapper.gpu import stream_on
from ballast.wrapper.meeting import Ranks
from ballast.wrapper.metrics import numbers_of_step, warn_of_step
from ballast.wrapper.modules import outside_of, refuse_outside, units_of_model
from ballast.wrapper.options import WrapOptions, without_gpu
from ballast.wrapper.own_parts import OwnParts
from ballast.wrapper.partition import Partition, StepNumbers
from ballast.wrapper.session_hooks import SessionHooks
from ballast.wrapper.state import is_what_is_there, read_of
from ballast.wrapper.units import Groups, Member, UnitOfMembers, gpu_of, names_of, units_of
from ballast.wrapper.updates import State, Updates, merged, steps_in
from ballast.wrapper.waiting import Waiting, defer, defer_again, drop_pending, make_the_rest
from ballast.wrapper.whole import WholeParameters
from ballast.wrapper.window import Window
from ballast.wrapper.writes import keeping_writes

log = logging.getLogger("ballast")


class Session:
    """Watches the optimizer's parameters, and partitions them when the first gradient arrives, in stage 3 when the model is
    called: until then it can be moved and cast. Made anew, with the state so far, when other parameters are trained."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        ranks: Ranks,
        updates: Updates,
        options: WrapOptions,
    ):
        self._optimizer = weakref.ref(optimizer)
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._ranks, self.group = ranks, ranks.of_data
        self._asked = self.options = options  # the latter with what was chosen, from the first partition on
        self._updates = updates
        self._partition: Partition | None = None
        self._of_this_step: Partition | None = None  # the same, once it is known to be of what is trained
        self._groups = Groups()
        self._loaded: State | None = None  # waits for the partition
        self._unbegun: State | None = None  # what a partition could not begin with
        self._outside: set[int] = set()  # ids of parameters that no module has
        self.aside: State = {}  # of parameters that are frozen now
        self._own_parts = OwnParts()  # of a partition that is gone; wait for the next one
        self._waiting = Waiting(weakref.ref(self))  # where parameters are in no partition
        self._process, self._steps_at_close, self.skipped = os.getpid(), 0, 0
        self.checkpoints: dict[str, set[str]] = {}  # by directory: the folders that this training has saved or loaded
        self.holds = False  # gradients, until more come
        self.last: _core.StepResult | None = None
        self.is_half_loaded, self._is_away, self.is_closed = False, False, False  # away from the device
        self._hooks = SessionHooks(weakref.ref(self))

    def begin(self) -> None:
        """Hook what can be trained, and begin with rank 0's values. All ranks do this together."""
        model = self.model if self.options.stage == 3 else self._model()
        mine = [each for _, each in self.parameters()]
        entering.require_untrained(model, mine, self.options.stage)
        defer(model, mine, self.group, self._waiting)
        self.watch()
        self._hooks.watch_calls(model, of_modules=not self.options.keeps_parameters_whole)
        entering.begin_alike(self.group, model, mine)

    def take_back(self) -> None:
        """Leave the optimizer and the model as they were: this rank refuses to wrap them."""
        self.close(together=False)
        defer_again(self._model(), (each for _, each in self.parameters()), self._waiting)

    def gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Keep what is written inside the block to parameters that are whole, or not partitioned yet."""
        return keeping_writes(self._model(), self._partition if self.options.keeps_parameters_whole else None, parameters)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it owns this
        return optimizer

    @property
    def model(self) -> torch.nn.Module:
        return entering.require_model(self._model())

    def parameters(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter

    def watch(self) -> None:
        """Every parameter that can be trained tells when its gradient has come."""
        self._hooks.watch((each for _, each in self._trained()), self.names())

    def names(self) -> dict[int, str]:
        return names_of(self.optimizer.param_groups, self._model())

    @property
    def stage(self) -> int | None:
        return self.options.stage

    # --- The partition ---

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        partition = self.partition()
        if id(parameter) in self._outside:
            refuse_outside(self.names()[id(parameter)])
        partition.arrived(parameter, hold=self.holds)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Partitions, where that has to be, before it runs."""
        begins_step = torch.is_grad_enabled()
        are_whole = self.options.keeps_parameters_whole
        if are_whole and not begins_step or (are_whole or self._partition is None) and not self._trained():
            return
        if self._of_this_step is not None and not self._of_this_step.has_begun:
            self._of_this_step = None  # no gradient came of the calls before, such as an evaluation's
        known = None if self._partition is None else weakref.ref(self._partition)  # it may go, and its memory
        partition = self.partition() if begins_step else self.partition_now()
        partition.require_not_updated("a model was called")
        if known is None or partition is not known():
            partition.begin_call(module)  # its own hook comes too late for this one

    def before_module(self, module: torch.nn.Module) -> None:  # of a model that is used by its methods
        if self._of_this_step is None and (torch.is_grad_enabled() or self._partition is None):
            self.before_forward(module)

    @contextmanager
    def holding(self) -> Iterator[None]:
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    def partition(self) -> Partition:
        """Of what is trained in this step: looked up when it begins."""
        self._of_this_step = self.partition_now()
        return self._of_this_step

    def partition_now(self) -> Partition:
        """The same, without a step that begins: parameters can still be frozen and thawed."""
        self.require_open("train")
        entering.require_here(self._is_away)
        entering.require_loaded(not self.is_half_loaded)
        with torch.inference_mode(False):  # what an evaluation begins with is trained later
            return self._of_this_step or self._look_up()

    def require_open(self, what: str) -> None:
        entering.require_open(what, is_closed=self.is_closed)

    def require_put_away(self, what: str) -> None:
        entering.require_here(self._is_away)
        if self._partition is not None:
            self._partition.require_put_away(what)

    def _look_up(self) -> Partition:
        self.watch()
        trained = self._trained()
        if self._partition is not None:
            if not trained:  # for the sake of what goes into the model: nothing moves
                return self._partition
            if self._unbegun is not None:
                self._begin_state(self._partition, self._unbegun)
            left = self._updates.left_of_state(self.optimizer, self._partition)
            if self._loaded is None and left is not None:
                self._loaded = read_of(left)
            known = self._outside | {id(member.parameter) for member in self._partition.members}
            is_same = known == {id(each) for _, each in trained}
            if is_same and self._loaded is None:
                return self._partition
            entering.require_same_run(self.options.run, is_same)
        return self._make_partition(trained)

    def _trained(self) -> list[tuple[int, torch.nn.Parameter]]:
        return [(number, each) for number, each in self.parameters() if each.requires_grad]

    def _make_partition(self, trained: list[tuple[int, torch.nn.Parameter]]) -> Partition:
        state, steps = self._loaded, 0
        if self._partition is not None:
            moments = [] if state is not None else self.names_of_moments()
            if state is None:
                steps = self._partition.steps
                state = {**self.aside, **self._updates.take_out(self.optimizer, self._partition)}
            self._take_apart(moments)
        try:
            state = merged(state or {}, self._own_parts.take_moments(but_of={id(each) for _, each in trained}))
            self._partition = self._own_parts.hand_over(partial(self._partition_of, trained, state, steps))
        except BaseException:
            self._loaded = state  # which is nowhere else any more
            self._show(merged(state or {}, self._own_parts.shown()))
            raise
        self._loaded, self._own_parts = None, OwnParts()
        self._begin_state(self._partition, state)
        if self.group.rank == 0:
            log.info("what each rank keeps:\n%s", self._partition.ledger(self._own_state()))
        return self._partition

    def _partition_of(
        self, trained: list[tuple[int, torch.nn.Parameter]], state: State, steps_before: int
    ) -> Partition:
        made = steps_in(state)
        steps = max([steps_before, *made.values()])
        names = self.names()
        self._groups = Groups()
        members = []
        for place, parameter in trained:
            begun_at = steps - made.get(id(parameter), 0)
            group = self._groups.number(place, begun_at)
            members.append(Member(parameter, names[id(parameter)], group, begun_at, self._ranks.counts(parameter)))
        self.options = self._settled(members)
        units, is_whole = self._units(members, self.options.stage), self.options.keeps_parameters_whole
        if (model := self._model()) is not None:
            make_the_rest(model, (member.parameter for unit in units for member in unit.members))
        gpu = gpu_of(members)
        options = self.options.for_training(gpu=gpu, stream=stream_on(gpu))
        reside: Any = partial(WholeParameters, self.group) if is_whole else partial(Window, self.model, self.group, options)
        self._outside = outside_of(units, members)
        partition = Partition(units, self._ranks, self.numbers, options, reside)
        with ExitStack() as undoing:
            undoing.callback(partition.release, together=False)
            if steps > 0 or self._loaded is not None:
                partition.continue_from(steps)
            undoing.pop_all()
        if is_whole:
            self._hooks.leave_modules()
        return partition

    def _begin_state(self, partition: Partition, state: State) -> None:
        self._unbegun = state
        now = {id(member.parameter) for member in partition.members}
        self.aside = {key: values for key, values in state.items() if key not in now}
        self._show(self.aside)
        self._updates.begin(self.optimizer, partition, state)
        self._unbegun = None

    def _show(self, state: State) -> None:
        self.optimizer.state.clear()
        for _, parameter in self.parameters():
            if id(parameter) in state:
                self.optimizer.state[parameter] = state[id(parameter)]

    def _settled(self, members: list[Member]) -> WrapOptions:
        rule, has_model = self._updates.rule(self.optimizer.param_groups[0]), self._model() is not None
        asked = without_gpu(self._asked) if gpu_of(members) is None else self._asked
        return settled(asked, Training(self.group, rule, members, has_model, partial(self._units, members)))

    def _units(self, members: list[Member], stage: int | None) -> list[UnitOfMembers]:
        return units_of_model(self.model, members, self.options.units) if stage == 3 else units_of(members)

    def numbers(self) -> StepNumbers:
        return StepNumbers(
            rules=[self._updates.rule(self.optimizer.param_groups[place]) for place in self._groups.places],
            begun_at=self._groups.begun_at,
            max_norm=self.options.max_norm,
            own_step=None if self._updates.own_step is None else self._own_step,
        )

    def _own_step(self, tiles: list[_core.TileToUpdate], factor: float) -> None:
        assert self._updates.own_step is not None and self._partition is not None
        self._updates.own_step(self.optimizer, self._partition, tiles, factor)

    def _take_apart(self, moments: list[tuple[_core.Moment, str]]) -> None:
        """For the next partition, so that nothing is gathered."""
        assert self._partition is not None
        self._partition.require_put_away("other parameters were to be trained, or with other state,")
        self._partition.end_step()
        self._own_parts = OwnParts(self._partition, moments, None if self.options.keeps_parameters_whole else self._waiting)
        self._drop_partition(gathers=False)
        self._own_parts.let_come()

    def _drop_partition(self, together: bool = True, gathers: bool = True) -> None:
        assert self._partition is not None
        self._partition.release(together or self.group.size == 1, gathers)
        self._updates.leave()
        self._partition = self._of_this_step = None
        if (optimizer := self._optimizer()) is not None:
            optimizer.state.clear()  # what is in it would be read from there, and keeps it

    # --- Steps ---

    def step(self, loss_scale: float, found_inf: bool) -> None:
        if self._of_this_step is not None and self._updates.left_of_state(self.optimizer, self._of_this_step) is not None:
            refuse_order("optimizer.state was changed between a backward pass and its step", needed="the same after step()")
        result = self.partition().step(loss_scale=loss_scale, discard=found_inf)
        self._of_this_step = None
        if result is None:
            return
        self.last = result
        self.skipped += int(result.skipped)
        if not found_inf and self.group.rank == 0:
            warn_of_step(result)

    def discard(self) -> None:
        if self._partition is not None and self._partition.discard():
            self._of_this_step = None

    @property
    def steps(self) -> int:
        if self._loaded is not None:
            return max(steps_in(self._loaded).values(), default=0)
        return self._steps_at_close if self._partition is None else self._partition.steps

    def metrics(self) -> dict[str, float]:
        """Of the last step, and of memory; empty before the first."""
        return {} if self.last is None else numbers_of_step(self.last, self.skipped, self._own_state())

    def ledger(self) -> str:
        return self.partition_now().ledger(self._own_state())

    def _own_state(self) -> tuple[_core.Tier, int]:
        """Where it lives, and its bytes, if it is in memory that is not the library's."""
        kept = 0 if self._partition is None else self._updates.state_bytes(self.optimizer, self._partition)
        return _core.Tier[self.options.tier_of_state], kept

    # --- While something else needs the device ---

    def offload(self, parameters: bool) -> None:
        """All ranks do this together."""
        self.partition_now().leave_device(parameters)
        self._of_this_step, self._is_away = None, True
        self._updates.leave_device(self.optimizer)

    def reload(self) -> None:
        """The same."""
        if self._partition is None or not self._is_away:
            refuse_order("a training was to be reloaded that is on its device", needed="offload() before")
        self._partition.return_to_device()
        self._is_away = False

    # --- State ---

    def load(self, state: State) -> None:
        """Whole, or this rank's part of it; taken over when the next step begins. All ranks do this together."""
        if is_what_is_there(state, self.optimizer.state) if state else self._partition is None and self._loaded is None:
            return
        self._loaded, self._of_this_step, self._unbegun = read_of(state), None, None
        self._own_parts.forget_moments()
        self._show(self._loaded)

    # --- Checkpoints ---

    def names_of_moments(self) -> list[tuple[_core.Moment, str]]:
        return self._updates.moments(self.optimizer)

    @property
    def has_own_step(self) -> bool:
        """No rule of the library makes the updates: state is the optimizer's own."""
        return self._updates.own_step is not None

    def begin_from(self, made: dict[int, int], steps: int, aside: State) -> Partition:
        """The partition, for state of so many steps that is about to be written to it; `is_half_loaded` is taken back
        when that is done. `made` are the steps that have trained each parameter, by its id. All ranks do this together."""
        self.watch()
        trained = self._trained()
        self.is_half_loaded = True
        self._loaded = self._of_this_step = self._unbegun = None
        self._own_parts.begin_again()
        begun = {id(each): (number, steps - made.get(id(each), 0)) for number, each in trained}
        if self._partition is None or not self._groups.regroup(self._partition.members, begun):
            if self._partition is not None:
                self._take_apart([])
            state: State = {key: {"step": count} for key, count in made.items()}
            self._partition = self._own_parts.hand_over(partial(self._partition_of, trained, state, steps))
            self._own_parts = OwnParts()
        self.aside = aside
        self._show(aside)
        assert self._partition is not None
        self._updates.begin(self.optimizer, self._partition, {})
        return self._partition

    # --- The end ---

    def close(self, *, together: bool) -> None:
        """Together with all ranks, which gather what is partitioned; or this one alone."""
        if os.getpid() != self._process:  # a fork has none of the threads
            return
        if together and self._partition is not None:
            self._partition.require_put_away("an optimizer was to be closed")
        self._steps_at_close, self.is_closed = self.steps, True
        self._hooks.remove()
        if self._is_away and (together or self.group.size == 1):
            self.reload()
        if self._partition is not None:
            self._drop_partition(together)
        elif together or self.group.size == 1:
            self._own_parts.give_back()
        if (model := self._model()) is not None:
            drop_pending(model, self._waiting)
        self._ranks.leave()
