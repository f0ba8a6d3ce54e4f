"""The life of a training: wrapping, the partition of each step, steps, checkpoints and closing."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch

from ballast import _core
from ballast._torch_compat import call_after_backward
from ballast.checks import refuse_order
from ballast.errors import FailureError, OutOfMemoryError
from ballast.outer.optimizer import OuterOptimizer
from ballast.ranks import Group
from ballast.torch.activations.saved_activations import ModelActivations, offload_activations_of
from ballast.torch.calls.hooks import Call, OneThread, TrainingHooks, refuse_other_thread
from ballast.torch.gpu import gpu_of_tensors
from ballast.torch.gradients.taken_gradients import TakenGradient
from ballast.torch.parameters.deferred_parameters import (
    DeferredParameters,
    defer,
    defer_again,
    drop_pending,
    make_unpartitioned,
)
from ballast.torch.parameters.gathered_memory import has_room
from ballast.torch.parameters.managed_parameter import Lifecycle, is_without_values
from ballast.torch.parameters.units import require_known, required
from ballast.torch.parameters.writes import Slots
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.training import preconditions
from ballast.torch.training.joint_runs import JointRun
from ballast.torch.training.metrics import Throughput, metrics_of_step, used_parameters, warn_of_step
from ballast.torch.training.model_and_optimizer import ModelAndOptimizer, require_shareable
from ballast.torch.training.partition import Partition
from ballast.torch.training.partitioner import OptimizerState, Partitioner, StateMigration
from ballast.torch.updates.rules import options_to_set
from ballast.torch.updates.sharded_state import State, begun_in, is_current_state
from ballast.torch.updates.updates import Updates, merged
from ballast.wrap_options import WrapOptions

log = logging.getLogger("ballast")


class Pending(Protocol):
    """The part of a PendingSave that a training needs."""

    @property
    def is_settled(self) -> bool: ...
    def wait(self) -> None: ...


class Training:
    """Trains the parameters of one optimizer.

    They are partitioned when the first gradient arrives, in stage 3 when the model is called: until then the model can be moved
    and cast. When other parameters are trained, or other state is loaded, the next step begins with another partition. All
    ranks call all methods together, except for hooks, reports and close().
    """

    def __init__(
        self,
        given: ModelAndOptimizer,
        ranks: ProcessGroups,
        updates: Updates,
        options: WrapOptions,
        outer: OuterOptimizer | None,
    ):
        self.given = given
        self.updates = updates
        self.outer = outer
        self.lifecycle = Lifecycle.OPEN
        self.partitioner = Partitioner(given, ranks, updates, options)
        self.state = OptimizerState(given, updates)
        self.current: Partition | None = None
        self.calls = OneThread()
        self.throughput: Throughput | None = None
        self.accumulates_locally = False  # whether gradients are held until more come
        self.checkpoints: dict[str, set[str]] = {}  # the folders that this training has saved or loaded, by directory
        self.pending: Pending | None = None  # the last save in the background
        self.snapshot: _core.Snapshot | None = None  # the memory of its copy, for the next one
        self.ranks = ranks
        self._step_partition: Partition | None = None  # the look-up when a step begins sets it
        self._deferred = DeferredParameters(weakref.ref(self))  # owns parameters between two partitions
        self._migration = StateMigration()  # shards of a partition that is gone, for the next one
        self._hooks = TrainingHooks(weakref.ref(self))
        self._activations: ModelActivations | None = None
        self._last_step: _core.StepResult | None = None
        self._last_norm = 0.0  # the norm of the last step's gradients, before clipping
        self.skipped = 0  # steps
        self._steps_at_close = 0
        self._process = os.getpid()
        self._has_looked_for_others = False  # others are parameters whose gradients nothing averages

    # --- The beginning ---

    def begin(self) -> None:
        """Hook the parameters and the model, and begin with rank 0's values. All ranks call it together."""
        given = self.given
        model = given.required_model if self.stage == 3 else given.model
        if self.options.tuning.overlap_gathers:
            why = "each module waits for its parameters before it runs"
            model = required(model, f"overlap gathers without a model: {why}", "tuning=ballast.Tuning(overlap_gathers=True)")
            preconditions.require_no_scripted(
                model, "overlap gathers", "overlap_gathers=None: each step() waits for all of them"
            )
        if self.stage == 3 and model is not None:
            preconditions.require_no_scripted(model, "shard parameters", "a stage below 3; or the module as it was before")
        mine = [each for _, each in given.parameters()]
        preconditions.require_parameters_of(model, mine)
        require_shareable(given, self)
        # Ranks compare them in this order.
        described = [*preconditions.describe(given.parameters(), given.names(), given.model)]
        self.group.require_same_parameters(described)
        if self.outer is not None and self.group.rank == 0:
            self.outer.hosts.group.require_same_parameters(described)
        given.join()
        defer(model, mine, self.group, self._deferred)
        self.watch()
        if (activations := self.options.activations) is not None:
            self._activations = offload_activations_of(model, mine, activations)  # below the hooks of stage 3
        lacks_values, are_full = self._lacks_values(), self.options.keeps_full_parameters
        self._hooks.watch_calls(model, with_modules=lacks_values or not are_full)
        if self.outer is not None and self.group.rank == 0:
            preconditions.begin_with_same_values(self.outer.hosts.group, model, mine)
        if are_full and not lacks_values:
            self._hooks.leave_graphs_whole()  # torch has all parameters
        preconditions.begin_with_same_values(self.group, model, mine, self.ranks.sharing)

    def take_back(self) -> None:
        """Undo begin(): this rank refuses to wrap the optimizer and the model, and leaves them as they were."""
        self.close(together=False)
        defer_again(self.given.model, (each for _, each in self.given.parameters()), self._deferred)

    def join_run(self, run: JointRun) -> None:
        """Resume the run with those of the model's other optimizers. Call it before the first partition."""
        self.partitioner.joint_run, run.training = run, weakref.ref(self)

    def wait_for_commit(self) -> None:
        if self.current is not None and self.lifecycle is not Lifecycle.OFFLOADED:  # offload() has waited
            self.current.core.wait_for_commit()

    def set_round(self, joint_round: _core.JointRound) -> None:
        if self.current is not None:
            self.current.core.set_round(joint_round)

    # --- What it trains ---

    @property
    def group(self) -> Group:
        return self.ranks.data_group

    @property
    def ranks_of_all_hosts(self) -> int:
        return self.group.size * (1 if self.outer is None else self.outer.hosts.size)

    @property
    def options(self) -> WrapOptions:
        """The options, with the chosen stage and tiers from the first partition on."""
        return self.partitioner.options

    @property
    def stage(self) -> int | None:
        return self.options.stage

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.given.optimizer

    def parameters(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        return self.given.parameters()

    def names(self) -> dict[int, str]:
        return self.given.names()

    def require_open(self, what: str) -> Training:
        """Return this training, unless it is closed."""
        if self.lifecycle is Lifecycle.CLOSED:
            refuse_order(
                f"cannot {what}: the optimizer is closed, and its state is gone",
                needed="a new optimizer for the same parameters, and ballast.wrap() of that one",
                remedy="To keep the state, call ballast.save() before close(), and ballast.load_checkpoint() into the new one.",
            )
        return self

    @property
    def lost(self) -> tuple[str, int | None] | None:
        """Why a run has begun again, and the newest step that it had."""
        run = self.partitioner.joint_run
        return self.partition_now().core.lost if run is None or run.lost is None else run.lost

    def watch(self) -> list[tuple[int, torch.nn.Parameter]]:
        """Hook every parameter that can be trained, so that it reports when its gradient has come, and return all of them, each
        after the number of its group."""
        trained = self.given.trained()
        self._hook(trained)
        return trained

    def _hook(self, trained: Sequence[tuple[int, torch.nn.Parameter]]) -> None:
        unwatched = [each for _, each in trained if id(each) not in self._hooks.on_gradients]
        names = self.given.names() if unwatched else {}  # most calls find nothing new
        for each in unwatched:
            require_known(each, names[id(each)])
            self._hooks.watch(each)

    # --- The partition of a step ---

    def partition(self) -> Partition:
        """Return the partition of the step that begins, or has begun. It is looked up when the step begins."""
        partition = self.partition_now()
        self._set_partition_of_step(partition)
        if self.outer is not None:
            self.outer.begin(partition)
        return partition

    def partition_now(self) -> Partition:
        """Return the partition without beginning a step: parameters can still be frozen and thawed."""
        self._require_there()
        if self._step_partition is not None:
            return self._step_partition
        with torch.inference_mode(False):  # an evaluation may begin with it, and training follows
            trained = self.given.trained()
            self._hook(trained)
            if (current := self.current) is not None:
                if not trained:  # only gradients of the model's inputs are computed
                    return current
                self.state.begin_again(current)
                self.state.load_changed(self.updates.changed_state(self.optimizer, current))
                is_same = self.partitioner.trains_exactly(current, trained)
                if is_same and not self.state.is_loaded and self.partitioner.has_groups(current):
                    return current
                if not is_same:
                    preconditions.refuse_other_parameters(self.options)
                del current  # its memory and its drives are free for the next one
            return self._make()

    def _set_partition_of_step(self, partition: Partition | None) -> None:
        """Set the partition of the step that has begun. If none has, a module that is called begins the next one: a user may
        call methods of the model instead of the model."""
        self._step_partition = partition
        if self.current is not None:
            self.current.memory.tell_of_calls(self._hooks.on_module_call if partition is None else None)

    def _require_there(self) -> None:
        """Refuse to use a training that has ended, is off its device, or has a part of a checkpoint."""
        if self.lifecycle is not Lifecycle.OPEN:
            self.require_open("train")
            preconditions.require_on_device(self.lifecycle)
            refuse_order(
                "cannot continue to train: a checkpoint was loaded in part",
                needed="ballast.load_checkpoint() of one that can be read",
            )

    def _require_unchanged(self, partition: Partition) -> None:
        """Refuse to make a step with other parameters, groups or state than those with which it began."""
        changed = "optimizer.state" if self.updates.changed_state(self.optimizer, partition) is not None else ""
        if not self.partitioner.has_groups(partition):
            changed = "optimizer.param_groups"
        if changed:
            what = f"cannot make a step: {changed} was changed between a backward pass and its step"
            refuse_order(what, needed="the same after step()")
        self.partitioner.require_no_others()

    # --- Another partition ---

    def _make(self) -> Partition:
        if self.options.keeps_full_parameters and not self.given.trained():
            refuse_order(
                "cannot begin to train: all parameters of the optimizer are frozen",
                needed="a parameter with requires_grad=True, below stage 3",
            )
        if self.current is None and self.optimizer.state:  # the user has put it there before the first step
            self.state.load_changed({id(each): values for each, values in self.optimizer.state.items()})
        state, steps, is_loaded = self.state.loaded, 0, self.state.is_loaded
        if self.current is not None:
            moments = [] if state is not None else self.updates.moments(self.optimizer)
            if state is None:
                steps = self.current.steps
                state = self.state.take_out(self.current)
            self._take_apart(moments)
        try:
            except_for = {id(each) for _, each in self.given.trained()}
            state = merged(state or {}, begun_in(state or {}, self._migration.take_moments(except_for=except_for)))
            partition = self._hand_over(partial(self.partitioner.make, state, steps, is_loaded=is_loaded))
        except BaseException:
            self.state.load(state or {}, begun_in(state or {}, self._migration.shown()))  # it is nowhere else any more
            raise
        self.state.forget()
        if self.partitioner.has_resumed:
            state = self.state.without_resumed(partition, state, self.options.run.name)
        self.state.begin(partition, state)
        if self.group.rank == 0:
            log.info("memory of each rank:\n%s", partition.core.ledger(self._custom_state()))
            if self.options.wire.given():
                log.info("ranks send codes: %s", self.options.wire)
        return partition

    def _hand_over(self, make: Callable[[], Partition]) -> Partition:
        with self.given.own_parameters():
            self.current = self._migration.hand_over(make, self.given.all_parameters)
        if not self.options.keeps_full_parameters:
            self.given.sharded_ids = frozenset(id(member.parameter) for member in self.current.all_members)
        self._hooks.remove_from_modules()
        if self.options.keeps_full_parameters:
            self._hooks.leave_graphs_whole()
        self._set_partition_of_step(self._step_partition)
        self._migration = StateMigration()
        return self.current

    def _take_apart(self, moments: list[tuple[_core.Moment, str]]) -> None:
        """End the partition, and keep its shards for the next one: nothing is gathered."""
        assert self.current is not None
        self.current.memory.require_not_gathered("cannot train other parameters, or with other state")
        self.current.end_step()
        if (run := self.partitioner.joint_run) is not None:
            run.resume_at = self.current.core.committed
        owner = None if self.options.keeps_full_parameters else self._deferred
        self._migration = StateMigration(self.current, moments, owner)
        self._drop(gathers=False)
        if owner is not None:
            self._hooks.watch_modules(self.given.required_model)
        self._migration.suspend_all()

    def _drop(self, together: bool = True, *, gathers: bool, keeps: bool = True) -> None:
        assert self.current is not None
        self.current.release(together or self.group.size == 1, gathers, keeps)
        self.current = self._step_partition = None
        self.state.forget_partition()

    # --- Called by hooks ---

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """Take a gradient that was added to `parameter.grad`."""
        if not self.calls.try_begin():
            refuse_other_thread("backward()", self.calls.running)
        try:
            if self.current is None and not self.options.keeps_full_parameters:
                call_after_backward(self._begin_after_backward)  # the rest of the pass needs the parameters that torch has
                return
            partition = self._step_partition or self.partition()
            if not partition.arrived(parameter, hold=self.accumulates_locally):
                self.partitioner.leave_or_refuse(parameter)
        finally:
            self.calls.end()

    def _begin_after_backward(self) -> None:
        """Partition the parameters after a backward pass, and take the gradients that wait in `parameter.grad`."""
        if self.current is None:
            with Call(self.calls, "backward()"):
                self.partition().accept_assignments()

    def before_forward(self, module: torch.nn.Module) -> None:
        """Partition the parameters before a module runs, if they are not partitioned yet."""
        begins_step = torch.is_grad_enabled()
        are_full, lacks_values = self.options.keeps_full_parameters, self._lacks_values()
        if are_full and not begins_step and not lacks_values:
            return
        if (are_full or self._waits_for_trained) and not self.given.trained():
            if lacks_values and not self._waits_for_trained:
                make_unpartitioned(self.given.required_model, (), self.given.keeps())
            return
        with Call(self.calls, "the model"):
            if not begins_step and self.current is not None:  # it has the values, whatever is trained next
                self._require_there()
                self.current.require_not_updated("cannot call the model")
                return
            if self._step_partition is not None and not self._step_partition.has_begun:
                self._set_partition_of_step(None)  # the calls before brought no gradients, as in an evaluation
            known = None if self.current is None else weakref.ref(self.current)  # the partition may go, and its memory
            partition = self.partition() if begins_step else self.partition_now()
            partition.require_not_updated("cannot call the model")
            if known is None or partition is not known():
                partition.memory.on_module_call(module)  # its own hook comes too late for this call

    def on_module_call(self, module: torch.nn.Module) -> None:
        """Do the same before a module inside the model runs, if no step has begun: a user may call methods of the model
        instead of the model."""
        if torch.is_grad_enabled() or self.current is None:
            self.before_forward(module)

    def _lacks_values(self) -> bool:
        """Return whether the model is deferred, so that its first call, also in an evaluation, begins the training."""
        if self.current is not None or (model := self.given.model) is None:
            return False
        return any(map(is_without_values, model.parameters()))

    @property
    def has_trained_nothing(self) -> bool:
        """Whether all parameters have been frozen since the beginning, so that there are no gradients and no partition."""
        return self.current is None and not self.given.trained()

    @property
    def _waits_for_trained(self) -> bool:
        """Whether the first partition has to have parameters that are trained: the stage is chosen for them, or no later
        partition may train others."""
        return self.current is None and (self.stage is None or self.outer is not None)

    @contextmanager
    def gathered(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        """Keep writes inside the block to parameters that are full, or not partitioned yet: torch's memory still holds them."""
        slots = Slots(self.given.model, parameters)
        is_watched = self.options.keeps_full_parameters and self.current is not None
        with self.current.memory.gathered(parameters) if is_watched and self.current is not None else nullcontext():
            yield
        slots.require_unchanged()

    def has_room(self, needed: int) -> bool:
        """Return whether each rank has room for so many bytes on its device. All ranks call it together."""
        return has_room(self.group, needed, self.options.memory, gpu_of_tensors(each for _, each in self.given.parameters()))

    # --- Steps ---

    def step(self, loss_scale: float, found_inf: bool) -> None:
        with Call(self.calls, "step()"):
            if (run := self.partitioner.joint_run) is not None:
                run.require_others()
            elif self.has_trained_nothing:
                self.partitioner.require_no_others()
                return
            partition = self.partition()
            self._require_unchanged(partition)
            self._require_averaged()
            result = partition.step(loss_scale=loss_scale, discard=found_inf, in_round=True)
            self._set_partition_of_step(None)
            if self._activations is not None:
                self._activations.after_step()
            if result is not None:
                self._last_step, self._last_norm = result, result.norm * partition.before_clipping
                self.skipped += int(result.skipped)
                if result.reason and not found_inf and self.group.rank == 0:
                    warn_of_step(result, partition.has_finite_factor)
                if self.outer is not None and self.current is not None:
                    self.outer.after_step(self.current, self._attempts)

    def _require_averaged(self) -> None:
        """Look for the model's parameters that no wrapped optimizer has, before the first step: by then all of them are
        wrapped."""
        if self._has_looked_for_others or self.ranks_of_all_hosts == 1:
            return
        preconditions.require_averaged(
            self.given.unaveraged(),
            in_data_parallel=self._hooks.has_data_parallel,
            warns=self.group.rank == 0 and self.given.is_first,
        )
        self._has_looked_for_others = True

    def discard(self, *, forget_zeros: bool) -> None:
        with Call(self.calls, "zero_grad()"):
            if (partition := self.current) is None:
                return
            if partition.discard():
                self._set_partition_of_step(None)
            if forget_zeros:
                partition.gradients.zeros.clear()

    @property
    def _attempts(self) -> int:
        """Steps with and without an update. Hosts may skip different ones."""
        return self.steps + self.skipped

    def exchange(self) -> None:
        """Exchange all parameters with the other hosts now, except those that were exchanged after the last step."""
        if self.outer is None:
            refuse_order("cannot exchange parameters: there is no outer optimizer", needed="ballast.wrap(..., outer=...)")
        self.require_not_gathered("cannot exchange parameters")
        partition = self.partition_now()
        partition.memory.require_not_cast()
        partition.require_not_updated("cannot exchange parameters")
        if partition.has_begun:
            what = "cannot exchange parameters between a backward pass and its step"
            refuse_order(what, needed="step() or zero_grad() before")
        self.outer.begin(partition)
        self.outer.exchange_all(partition, self._attempts)

    # --- While something else needs the device ---

    def offload(self, parameters: bool) -> None:
        """Free the device's memory, with or without that of the parameters."""
        self.partition_now().offload(parameters)
        self._set_partition_of_step(None)
        self.lifecycle = Lifecycle.OFFLOADED
        self.updates.offload(self.optimizer)
        if self.outer is not None:
            self.outer.offload()

    def reload(self) -> None:
        if self.current is None or self.lifecycle is not Lifecycle.OFFLOADED:
            refuse_order("cannot reload: the training is already on its device", needed="offload() before")
        self.current.reload()
        self.lifecycle = Lifecycle.OPEN
        if self.outer is not None:
            self.outer.reload()

    def require_not_gathered(self, what: str) -> None:
        preconditions.require_on_device(self.lifecycle)
        if self.current is not None:
            self.current.memory.require_not_gathered(what)

    # --- Reports ---

    @property
    def steps(self) -> int:
        if (loaded := self.state.steps_of_loaded) is not None:
            return loaded
        return self._steps_at_close if self.current is None else self.current.steps

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step and of memory; nothing before the first step."""
        if (last := self._last_step) is None:
            return {}
        figures = metrics_of_step(last, self.skipped, self._custom_state()) | {"grad_norm": self._last_norm}
        if self.throughput is not None:
            model = self.given.model
            used = [each for _, each in self.parameters()] if model is None else used_parameters(model)
            figures |= self.throughput.figures(last.metrics.seconds, self.ranks_of_all_hosts, used)
        if self._activations is not None:
            figures |= self._activations.figures
        return figures if self.outer is None else figures | self.outer.figures()

    def ledger(self) -> str:
        outer_ledger = "" if self.outer is None else self.outer.ledger()
        return self.partition_now().core.ledger(self._custom_state()) + outer_ledger

    def _custom_state(self) -> tuple[_core.Tier, int]:
        """Return the tier and the bytes of state outside the library's memory."""
        kept = 0 if self.current is None else self.updates.state_bytes(self.optimizer, self.current)
        return _core.Tier[self.options.tier_of_state], kept

    # --- State, from optimizer.load_state_dict() ---

    def load(self, state: State) -> None:
        """Load full state, or this rank's shard. The next step takes it over when it begins."""
        if self._is_loaded(state):
            return
        self._set_partition_of_step(None)
        self.state.load(state)
        self._migration.forget_moments()

    def require_state_loadable(self, state: State) -> None:
        """Refuse other state between a backward pass and its step: the partition of this state would lack the gradients."""
        if self.current is None or not self.current.has_begun or self._is_loaded(state):
            return
        gradients = [member.parameter.grad for member in self.current.members]
        if any(isinstance(each, TakenGradient) for each in gradients):  # model.zero_grad() clears them
            what = "cannot load a state_dict() between a backward pass and its step: it has gradients"
            refuse_order(what, needed="step() or zero_grad() before load_state_dict()")

    def _is_loaded(self, state: State) -> bool:
        if not state:
            return not self.state.is_loaded and (self.current is None or self.state.is_unbegun(self.current))
        return is_current_state(state, self.optimizer.state)

    def options_to_set(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the options of the groups as a checkpoint brings them. Raise B1001 where the optimizer cannot use them."""
        return options_to_set(self.optimizer.param_groups, saved, self.updates.rule)

    # --- Checkpoints ---

    def parameters_of_siblings(self) -> Iterator[torch.nn.Parameter]:
        for sibling in self.given.siblings():
            for _, parameter in sibling.parameters():
                yield parameter

    def names_of_moments(self) -> list[tuple[_core.Moment, str]]:
        """Return the moments of a rule of the library."""
        return [] if self.has_custom_step else self.updates.moments(self.optimizer)

    def names_of_stored_values(self) -> list[str]:
        """Return the values of each element that the library keeps for the optimizer's own step, in their order there."""
        return [name for _, name in self.updates.moments(self.optimizer)] if self.has_custom_step else []

    @property
    def has_custom_step(self) -> bool:
        """Whether the optimizer's own step makes the updates, and its own state."""
        return self.updates.has_custom_step

    def finish_pending(self) -> None:
        """Wait for the save in the background, unless the caller did so, and raise its error. All ranks call this together."""
        if self.pending is not None and not self.pending.is_settled:
            self.pending.wait()

    def require_loadable(self) -> None:
        """Refuse to load a checkpoint while parameters are gathered, or while none is trained: below stage 3 a partition has no
        others."""
        self.require_not_gathered("cannot load a checkpoint")
        if self.stage != 3 and not self.given.trained():
            refuse_order(
                "cannot load a checkpoint: all parameters of the optimizer are frozen",
                needed="one that is trained; or stage 3",
                remedy="Load the checkpoint first, and freeze parameters after that.",
            )

    def require_changeable(self) -> None:
        """Refuse to change the state between the steps of the model's optimizers, if their runs are resumed together."""
        if (run := self.partitioner.joint_run) is not None:
            run.runs.require_no_step()

    def changed_together(self) -> AbstractContextManager[None]:
        """Return a block whose changes are committed as one round, if the model's optimizers have joint runs."""
        run = self.partitioner.joint_run
        return nullcontext() if run is None else run.runs.changed_together()

    def begin_from(self, made: dict[int, int], steps: int, frozen_state: State) -> Partition:
        """Return a partition that continues after `steps`. The caller writes the state to it, and then calls
        finish_loading(). `made` has the number of steps that have trained each parameter, by its id. All ranks call
        it together."""
        if self.outer is not None:
            self.outer.forget()
        trained = self.watch()
        self.lifecycle = Lifecycle.HALF_LOADED
        self.state.forget()
        self._set_partition_of_step(None)
        self._migration.begin_again()
        places = {id(each): place for place, each in trained}
        partition = self.current
        if partition is None or not self.partitioner.groups.regroup(partition.members, places):
            if partition is not None:
                del partition  # its memory can be freed then
                self._take_apart([])
            state: State = {key: {"step": count} for key, count in made.items()}
            partition = self._hand_over(partial(self.partitioner.make, state, steps, is_loaded=False))
        else:
            for member in partition.members:
                member.missed = steps - made.get(id(member.parameter), 0)
            self.updates.keep_metadata(partition, {})
        self.state.begin(partition, frozen_state)  # with zeros of those that are trained, which the caller replaces
        return partition

    def finish_loading(self) -> None:
        self.lifecycle = Lifecycle.OPEN

    # --- The end ---

    def close(self, *, together: bool, gather: bool = True) -> None:
        """End the training, either together with all ranks, or on this rank alone. Parameters return to torch if all ranks
        gather them."""
        if os.getpid() != self._process or self.lifecycle is Lifecycle.CLOSED:  # a fork has none of the threads
            return
        if self.current is not None:
            if together:
                self.current.memory.require_not_gathered("cannot close the optimizer")
            if together and gather:
                with suppress(FailureError):  # the end says so
                    self.current.require_room_to_close()
            elif self.group.size == 1:
                gather = gather and self._can_return_values(self.current)
        try:
            if together:
                self.finish_pending()
        finally:
            self.snapshot = None
            self._end(together, gather)

    def _can_return_values(self, partition: Partition) -> bool:
        """Return whether values can go to torch's memory where the optimizer of a lone rank is deleted, or at exit: they fit,
        and no step has failed."""
        try:
            partition.require_room_to_close()
        except (FailureError, OutOfMemoryError) as error:
            log.warning("the parameters lose their values: %s", error)
            return False
        return True

    def _end(self, together: bool, gather: bool) -> None:
        self._hooks.remove()
        self.given.leave()
        if self._activations is not None:
            self._activations.remove()
        returns_values = gather and (together or self.group.size == 1)
        was_offloaded, self._steps_at_close = self.lifecycle is Lifecycle.OFFLOADED, self.steps
        self.lifecycle = Lifecycle.CLOSED
        if (run := self.partitioner.joint_run) is not None:
            run.is_closed = True
        try:
            if self.current is not None:
                if was_offloaded and returns_values:
                    self.current.reload()
                self._drop(together, gathers=gather, keeps=gather)
            elif returns_values:
                self._migration.return_to_torch()
            if (model := self.given.model) is not None:
                drop_pending(model, self._deferred)
        finally:
            if self.outer is not None:
                self.outer.close()
            self.ranks.leave()
