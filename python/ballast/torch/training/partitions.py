"""The current partition, and the change to another one when other parameters are trained or other state is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from ballast import _core
from ballast.checks import refuse_order
from ballast.torch.calls.hooks import SessionHooks
from ballast.torch.gradients.taken_gradients import TakenGradient
from ballast.torch.parameters.deferred_parameters import DeferredParameters, drop_pending
from ballast.torch.parameters.units import refuse_outside
from ballast.torch.training import preconditions
from ballast.torch.training.joint_runs import JointRun
from ballast.torch.training.model_and_optimizer import Wrapped
from ballast.torch.training.optimizer_state import OptimizerState
from ballast.torch.training.partition import Partition
from ballast.torch.training.partition_factory import PartitionFactory
from ballast.torch.training.state_migration import StateMigration
from ballast.torch.updates.shown_state import begun_in
from ballast.torch.updates.updates import State, merged

log = logging.getLogger("ballast")


class Partitions:
    """Makes a partition when it is first needed: until then the model can be moved and cast. All ranks call all methods
    together, except close()."""

    def __init__(self, wrapped: Wrapped, factory: PartitionFactory, hooks: SessionHooks, deferred: DeferredParameters):
        self.wrapped = wrapped
        self.factory = factory
        self.state = OptimizerState(wrapped, factory.updates)
        self.current: Partition | None = None
        self._of_this_step: Partition | None = None
        self._hooks = hooks
        self._deferred = deferred  # owns parameters between two partitions
        self._migration = StateMigration()  # shards of a partition that is gone, for the next one
        self._steps_at_close = 0
        self.is_half_loaded, self.is_offloaded, self.is_closed = False, False, False

    # --- The partition of now ---

    @property
    def of_this_step(self) -> Partition | None:
        """The partition, after the look-up when a step begins."""
        return self._of_this_step

    @of_this_step.setter
    def of_this_step(self, partition: Partition | None) -> None:
        self._of_this_step = partition
        self._watch_uses()

    def _watch_uses(self) -> None:
        """Let a module that is called between steps begin the next one: a user may call methods of the model instead of
        the model."""
        if self.current is not None:
            self.current.before_uses(self._hooks.before_module if self._of_this_step is None else None)

    def begin_step(self) -> Partition:
        """Return the partition of the parameters that this step trains. It is looked up when the step begins."""
        self.of_this_step = self.now()
        return self.of_this_step

    def now(self) -> Partition:
        """Return the partition without beginning a step: parameters can still be frozen and thawed."""
        self.require_there()
        with torch.inference_mode(False):  # an evaluation may begin with it, and training follows
            return self.of_this_step or self._look_up()

    def require_there(self) -> None:
        """Refuse to use a training that has ended, is off its device, or has a part of a checkpoint."""
        self.require_open("train")
        preconditions.require_on_device(self.is_offloaded)
        preconditions.require_loaded(not self.is_half_loaded)

    def require_unchanged(self) -> None:
        """Refuse to make a step with other parameters, groups or state than those with which it began."""
        if (partition := self._of_this_step) is None:
            return
        changed = "optimizer.state" if self.state.has_changed(partition) else ""
        if not self.factory.has_groups(partition):
            changed = "optimizer.param_groups"
        if changed:
            what = f"cannot make a step: {changed} was changed between a backward pass and its step"
            refuse_order(what, needed="the same after step()")
        for each in self.factory.added():
            self.leave_or_refuse(each)

    def leave_or_refuse(self, parameter: torch.nn.Parameter) -> None:
        """Leave the gradient of a parameter to torch if the optimizer does not have it. Refuse the gradient if the partition
        lacks the parameter for another reason."""
        if all(each is not parameter for _, each in self.wrapped.parameters()):
            return
        name = self.wrapped.names()[id(parameter)]
        if id(parameter) in self.factory.outside:
            refuse_outside(name)
        refuse_order(
            "cannot take a gradient: the parameter is trained only since a later backward pass of this step",
            where=f"parameter {name}",
            needed="the same trained parameters in all backward passes of a step",
            remedy="Unfreeze or add it before the first backward pass of a step.",
        )

    def require_open(self, what: str) -> None:
        preconditions.require_open(what, is_closed=self.is_closed)

    def require_not_gathered(self, what: str) -> None:
        preconditions.require_on_device(self.is_offloaded)
        if self.current is not None:
            self.current.require_not_gathered(what)

    def watch(self) -> None:
        """Hook every parameter that can be trained, so that it reports when its gradient has come."""
        self._hooks.watch((each for _, each in self.wrapped.trained()), self.wrapped.names)

    def _look_up(self) -> Partition:
        self.watch()
        if self.current is not None:
            trained = self.wrapped.trained()
            if not trained:  # only gradients of the model's inputs are computed
                return self.current
            self.state.begin_again(self.current)
            self.state.load_changed(self.current)
            is_same = self.factory.trains_exactly(self.current, trained)
            if is_same and self.state.loaded is None and self.factory.has_groups(self.current):
                return self.current
            preconditions.require_same_run(self.factory.options.run.name, is_same)
            preconditions.require_same_in_outer(self.factory.options.outer is not None, is_same)
        return self._make()

    # --- Runs that are resumed together ---

    def join(self, run: JointRun) -> None:
        """Resume the run with those of other optimizers. Call it before the first partition."""
        self.factory.joint_run = run
        run.register(self)

    def wait_for_commit(self) -> None:
        """Wait until the last step is committed."""
        if self.current is not None and not self.is_offloaded:  # offload() has waited
            self.current.wait_for_commit()

    def set_round(self, joint_round: _core.JointRound) -> None:
        if self.current is not None:
            self.current.set_round(joint_round)

    # --- To the next partition ---

    def _make(self) -> Partition:
        if self.factory.options.keeps_full_parameters and not self.wrapped.trained():
            refuse_order(
                "cannot begin to train: all parameters of the optimizer are frozen",
                needed="a parameter with requires_grad=True, below stage 3",
            )
        state, steps = self.state.loaded, 0
        if self.current is not None:
            moments = [] if state is not None else self.factory.updates.moments(self.wrapped.optimizer)
            if state is None:
                steps = self.current.steps
                state = self.state.take_out(self.current)
            self._take_apart(moments)
        try:
            except_for = {id(each) for _, each in self.wrapped.trained()}
            state = merged(state or {}, begun_in(state or {}, self._migration.take_moments(except_for=except_for)))
            is_loaded = self.state.loaded is not None
            partition = self._hand_over(partial(self.factory.make, state, steps, is_loaded=is_loaded))
        except BaseException:
            self.state.loaded = state  # it is nowhere else any more
            self.state.show(merged(state or {}, begun_in(state or {}, self._migration.shown())))
            raise
        self.state.loaded = None
        if self.factory.has_resumed:
            state = self.state.without_resumed(partition, state, self.factory.options.run.name)
        self.state.begin(partition, state)
        if self.factory.ranks.of_data.rank == 0:
            log.info("memory of each rank:\n%s", partition.ledger(self.custom_state()))
            if self.factory.options.wire.given():
                log.info("ranks send codes: %s", self.factory.options.wire)
        return partition

    def begin_from(self, made: dict[int, int], steps: int, frozen_state: State) -> Partition:
        """Return a partition that continues after `steps`. The caller writes the state to it; until that is complete,
        `is_half_loaded` is set. `made` has the number of steps that have trained each parameter, by its id."""
        self.watch()
        self.is_half_loaded = True
        self.state.forget()
        self.of_this_step = None
        self._migration.begin_again()
        places = {id(each): place for place, each in self.wrapped.trained()}
        partition = self.current
        if partition is None or not self.factory.groups.regroup(partition.members, places):
            if partition is not None:
                del partition  # so that its memory can be freed
                self._take_apart([])
            state: State = {key: {"step": count} for key, count in made.items()}
            partition = self._hand_over(partial(self.factory.make, state, steps, is_loaded=False))
        else:
            for member in partition.members:
                member.missed = steps - made.get(id(member.parameter), 0)
            self.factory.updates.keep_note(partition, {})
        self.state.begin_empty(partition, frozen_state)
        return partition

    def _hand_over(self, make: Callable[[], Partition]) -> Partition:
        with self.wrapped.own_parameters():
            self.current = self._migration.hand_over(make)
        if not self.factory.options.keeps_full_parameters:
            self.wrapped.sharded_ids = frozenset(id(member.parameter) for member in self.current.all_members)
        self._hooks.remove_from_modules()
        if self.factory.options.keeps_full_parameters and not self.factory.options.tuning.overlap_gathers:
            self._hooks.leave_graphs_whole()
        self._watch_uses()
        self._migration = StateMigration()
        return self.current

    def _take_apart(self, moments: list[tuple[_core.Moment, str]]) -> None:
        """End the partition, and keep its shards for the next one: nothing is gathered."""
        assert self.current is not None
        self.current.require_not_gathered("cannot train other parameters, or with other state")
        self.current.end_step()
        if (run := self.factory.joint_run) is not None:
            run.resume_at = self.current.committed
        owner = None if self.factory.options.keeps_full_parameters else self._deferred
        self._migration = StateMigration(self.current, moments, owner)
        self._drop(gathers=False)
        if owner is not None:
            self._hooks.watch_modules(self.wrapped.required_model)
        self._migration.suspend_all()

    def _drop(self, together: bool = True, gathers: bool = True) -> None:
        assert self.current is not None
        self.current.release(together or self.factory.ranks.of_data.size == 1, gathers)
        self.current = self._of_this_step = None
        self.state.forget_partition()

    # --- Reports ---

    @property
    def steps(self) -> int:
        if (loaded := self.state.steps_of_loaded) is not None:
            return loaded
        return self._steps_at_close if self.current is None else self.current.steps

    def custom_state(self) -> tuple[_core.Tier, int]:
        """Return the tier and the bytes of state outside the library's memory."""
        kept = 0 if self.current is None else self.factory.updates.state_bytes(self.wrapped.optimizer, self.current)
        return _core.Tier[self.factory.options.tier_of_state], kept

    # --- State, from optimizer.load_state_dict() ---

    def load(self, state: State) -> None:
        """Load full state, or this rank's shard. The next step takes it over when it begins."""
        if self._is_loaded(state):
            return
        self.of_this_step = None
        self.state.load(state)
        self._migration.forget_moments()

    def require_loadable(self, state: State) -> None:
        """Refuse other state between a backward pass and its step: the partition of this state would lack the gradients."""
        if self.current is None or not self.current.has_begun or self._is_loaded(state):
            return
        gradients = [member.parameter.grad for member in self.current.members]
        if any(isinstance(each, TakenGradient) for each in gradients):  # model.zero_grad() clears them
            what = "cannot load a state_dict() between a backward pass and its step: it has gradients"
            refuse_order(what, needed="step() or zero_grad() before load_state_dict()")

    def _is_loaded(self, state: State) -> bool:
        if not state:
            return self.state.loaded is None and (self.current is None or self.state.is_unbegun(self.current))
        return self.state.is_current(state)

    # --- While something else needs the device ---

    def offload(self, parameters: bool) -> None:
        self.now().offload(parameters)
        self.of_this_step, self.is_offloaded = None, True
        self.factory.updates.offload(self.wrapped.optimizer)

    def reload(self) -> None:
        if self.current is None or not self.is_offloaded:
            refuse_order("cannot reload: the training is already on its device", needed="offload() before")
        self.current.reload()
        self.is_offloaded = False

    # --- The end ---

    def close(self, *, together: bool) -> None:
        """End the training, either together with all ranks, which gather the parameters, or on this rank alone."""
        is_alone = self.factory.ranks.of_data.size == 1
        self._steps_at_close, self.is_closed = self.steps, True
        if (run := self.factory.joint_run) is not None:
            run.close()
        if self.is_offloaded and (together or is_alone):
            self.reload()
        if self.current is not None:
            self._drop(together)
        elif together or is_alone:
            self._migration.return_to_torch()
        if (model := self.wrapped.model) is not None:
            drop_pending(model, self._deferred)
