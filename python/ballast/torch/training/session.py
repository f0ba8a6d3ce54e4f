"""The life of a wrapped optimizer: wrapping, partitions, steps and closing."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ballast.checks import refuse_order
from ballast.connecting import Group
from ballast.outer.optimizer import OuterOptimizer
from ballast.torch.activations.saved_activations import ModelActivations, offload_activations_of
from ballast.torch.calls.hooks import SessionHooks
from ballast.torch.calls.one_thread import OneThread, refuse_other_thread
from ballast.torch.parameters.deferred_parameters import DeferredParameters, defer, defer_again, make_unpartitioned
from ballast.torch.parameters.managed_parameter import is_without_values
from ballast.torch.parameters.writes import keeping_writes
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.training import preconditions
from ballast.torch.training.checkpoint_access import CheckpointAccess
from ballast.torch.training.joint_runs import JointRun
from ballast.torch.training.metrics import StepHistory, Throughput, used_parameters
from ballast.torch.training.model_and_optimizer import Wrapped
from ballast.torch.training.partition import Partition
from ballast.torch.training.partition_factory import PartitionFactory
from ballast.torch.training.partitions import Partitions
from ballast.torch.training.preconditions import in_words, in_words_of_model, require_same_parameters
from ballast.torch.training.sharing import require_own, require_shareable
from ballast.torch.updates.updates import State, Updates
from ballast.wrap_options import WrapOptions


class Session:
    """Watches the optimizer's parameters. They are partitioned when the first gradient arrives, in stage 3 when the
    model is called."""

    def __init__(
        self,
        wrapped: Wrapped,
        ranks: ProcessGroups,
        updates: Updates,
        options: WrapOptions,
        outer: OuterOptimizer | None,
    ):
        self._wrapped = wrapped
        self._ranks = ranks
        self._deferred = DeferredParameters(weakref.ref(self))
        self._hooks = SessionHooks(weakref.ref(self))
        factory = PartitionFactory(self._wrapped, ranks, updates, options)
        self.partitions = Partitions(self._wrapped, factory, self._hooks, self._deferred)
        self._activations: ModelActivations | None = None
        self._history = StepHistory()
        self.throughput: Throughput | None = None
        self._outer = outer
        self.checkpoint = CheckpointAccess(self.partitions, self._history, outer)
        self._process = os.getpid()
        self.calls = OneThread()
        self.accumulates_locally = False  # whether gradients are held until more come
        self._has_looked_for_others = False  # for parameters whose gradients nothing averages

    # --- The beginning ---

    def begin(self) -> None:
        """Hook the parameters and the model, and begin with rank 0's values. All ranks call it together."""
        wrapped = self._wrapped
        model = wrapped.required_model if self.stage == 3 else wrapped.model
        if self.options.tuning.overlap_gathers:
            preconditions.require_model_of_calls(model)
        mine = [each for _, each in wrapped.parameters()]
        preconditions.require_parameters_of(model, mine)
        require_shareable(wrapped, self)
        self._require_same_parameters()
        wrapped.join()
        defer(model, mine, self.group, self._deferred)
        self.partitions.watch()
        self._activations = offload_activations_of(model, mine, self.options.activations)  # below the hooks of stage 3
        self._hooks.watch_calls(model, of_modules=self._lacks_values() or not self.options.keeps_full_parameters)
        if self._outer is not None and self.group.rank == 0:
            preconditions.begin_with_same_values(self._outer.hosts.group, model, mine)
        if self._needs_no_calls():
            self._hooks.leave_graphs_whole()
        preconditions.begin_with_same_values(self.group, model, mine)

    def _require_same_parameters(self) -> None:
        """Compare parameters and buffers over ranks, which exchange them in this order."""
        model = self._wrapped.model
        of_model = () if model is None else in_words_of_model(model)
        mine = [*in_words(self._wrapped.parameters(), self.names()), *of_model]
        require_same_parameters(self.group, mine)
        if self._outer is not None and self.group.rank == 0:
            require_same_parameters(self._outer.hosts.group, mine)

    def _needs_no_calls(self) -> bool:
        """Return whether training may begin with the first gradient: torch has all parameters, and nothing waits for them."""
        options = self.options
        return options.keeps_full_parameters and not options.tuning.overlap_gathers and not self._lacks_values()

    def take_back(self) -> None:
        """Undo begin(): this rank refuses to wrap the optimizer and the model, and leaves them as they were."""
        self.close(together=False)
        defer_again(self._wrapped.model, (each for _, each in self._wrapped.parameters()), self._deferred)

    @property
    def group(self) -> Group:
        return self._ranks.of_data

    @property
    def has_norm_group(self) -> bool:
        return self._ranks.of_model is not None

    @property
    def ranks_of_all_hosts(self) -> int:
        return self.group.size * (1 if self._outer is None else self._outer.hosts.size)

    @property
    def options(self) -> WrapOptions:
        """The options, with the chosen stage and tiers from the first partition on."""
        return self.partitions.factory.options

    @property
    def stage(self) -> int | None:
        return self.options.stage

    @property
    def is_closed(self) -> bool:
        return self.partitions.is_closed

    def require_open(self, what: str) -> None:
        self.partitions.require_open(what)

    @property
    def lost(self) -> tuple[str, int | None] | None:
        """Why a run has begun again, and the newest step that it had."""
        run = self.partitions.factory.joint_run
        return self.partition_now().lost if run is None or run.lost is None else run.lost

    def names(self) -> dict[int, str]:
        return self._wrapped.names()

    def partition(self) -> Partition:
        """Return the partition of the step that begins, or has begun."""
        partition = self.partitions.begin_step()
        if self._outer is not None:
            self._outer.begin(partition)
        return partition

    def partition_now(self) -> Partition:
        """Return the partition without beginning a step."""
        return self.partitions.now()

    def join_run(self, run: JointRun) -> None:
        """Resume the run with those of the model's other optimizers."""
        self.partitions.join(run)

    def load(self, state: State) -> None:
        """Take the optimizer's state over when the next step begins. All ranks do this together."""
        self.partitions.load(state)

    # --- Called by hooks ---

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """Take a gradient that was added to `parameter.grad`."""
        if not self.calls.try_begin():
            refuse_other_thread("backward()", self.calls.running)
        try:
            partition = self.partitions.of_this_step or self.partition()
            if partition.trains(parameter):
                partition.arrived(parameter, hold=self.accumulates_locally)
            else:
                self.partitions.leave_or_refuse(parameter)
        finally:
            self.calls.end()

    def before_forward(self, module: torch.nn.Module) -> None:
        """Partition the parameters before a module runs, if they are not partitioned yet."""
        begins_step = torch.is_grad_enabled()
        are_full, lacks_values = self.options.keeps_full_parameters, self._lacks_values()
        if are_full and not begins_step and not lacks_values:
            return
        if (are_full or self._waits_for_trained) and not self._wrapped.trained():
            if lacks_values and not self._waits_for_trained:
                make_unpartitioned(self._wrapped.required_model, (), self._wrapped.keeps())
            return
        with self.calls.call("the model"):
            self._begin_forward(module, begins_step)

    def _begin_forward(self, module: torch.nn.Module, begins_step: bool) -> None:
        partitions = self.partitions
        if not begins_step and partitions.current is not None:  # it has the values, whatever is trained next
            partitions.require_there()
            partitions.current.require_not_updated("cannot call the model")
            return
        if partitions.of_this_step is not None and not partitions.of_this_step.has_begun:
            partitions.of_this_step = None  # the calls before brought no gradients, as in an evaluation
        known = None if partitions.current is None else weakref.ref(partitions.current)  # the partition may go, and its memory
        partition = self.partition() if begins_step else partitions.now()
        partition.require_not_updated("cannot call the model")
        if known is None or partition is not known():
            partition.begin_call(module)  # its own hook comes too late for this call

    def _lacks_values(self) -> bool:
        """Return whether the model is deferred, so that its first call, also in an evaluation, begins the training."""
        if self.partitions.current is not None or (model := self._wrapped.model) is None:
            return False
        return any(map(is_without_values, model.parameters()))

    @property
    def has_trained_nothing(self) -> bool:
        """Whether all parameters have been frozen since the beginning, so that there are no gradients and no partition."""
        return self.partitions.current is None and not self._wrapped.trained()

    @property
    def _waits_for_trained(self) -> bool:
        """Return whether the first partition has to have parameters that are trained: the stage is chosen for them, or no later
        partition may train others."""
        return self.partitions.current is None and (self.stage is None or self._outer is not None)

    def before_compiled_forward(self, module: torch.nn.Module) -> None:
        """Do the same before a model runs that torch has compiled: operations in it do not wait for parameters."""
        if self.partitions.current is not None:
            self.partitions.current.finish()
        self.before_forward(module)

    def before_module(self, module: torch.nn.Module) -> None:
        """Do the same before a module inside the model runs, if no step has begun: a user may call methods of the model
        instead of the model."""
        if torch.is_grad_enabled() or self.partitions.current is None:
            self.before_forward(module)

    def require_addable(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Refuse parameters of another optimizer in a new group."""
        require_own("cannot add a parameter group", self._wrapped, self, parameters)

    def gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Keep writes inside the block to parameters that are full, or not partitioned yet."""
        watcher = self.partitions.current if self.options.keeps_full_parameters else None
        return keeping_writes(self._wrapped.model, watcher, parameters)

    # --- Steps ---

    @contextmanager
    def holding(self) -> Iterator[None]:
        before, self.accumulates_locally = self.accumulates_locally, True
        try:
            yield
        finally:
            self.accumulates_locally = before

    def step(self, loss_scale: float, found_inf: bool) -> None:
        with self.calls.call("step()"):
            self._step(loss_scale, found_inf)

    def _step(self, loss_scale: float, found_inf: bool) -> None:
        partitions = self.partitions
        partitions.require_unchanged()
        if (run := partitions.factory.joint_run) is not None:
            run.require_others()
        elif self.has_trained_nothing:
            return
        partition = self.partition()
        self._require_averaged()
        result = partition.step(loss_scale=loss_scale, discard=found_inf, in_round=True)
        partitions.of_this_step = None
        if self._activations is not None:
            self._activations.after_step()
        if result is not None:
            warns = not found_inf and self.group.rank == 0
            self._history.add(result, partition.before_clipping, warns=warns, has_finite_factor=partition.has_finite_factor)
            if self._outer is not None and partitions.current is not None:
                self._outer.after_step(partitions.current, self._attempts)

    def _require_averaged(self) -> None:
        """Look for the model's parameters that no wrapped optimizer has, before the first step: by then all of them are
        wrapped."""
        if self._has_looked_for_others or self.ranks_of_all_hosts == 1:
            return
        preconditions.require_averaged(
            self._wrapped.unaveraged(),
            in_data_parallel=self._hooks.has_data_parallel,
            warns=self.group.rank == 0 and self._wrapped.is_first,
        )
        self._has_looked_for_others = True

    @property
    def _attempts(self) -> int:
        """Steps with and without an update. Hosts may skip different ones."""
        return self.partitions.steps + self._history.skipped

    def exchange(self) -> None:
        """Exchange all parameters with the other hosts now, except those that were exchanged after the last step."""
        if self._outer is None:
            refuse_order("cannot exchange parameters: there is no outer optimizer", needed="ballast.wrap(..., outer=...)")
        self.partitions.require_not_gathered("cannot exchange parameters")
        partition = self.partition_now()
        partition.require_not_cast()
        partition.require_not_updated("cannot exchange parameters")
        if partition.has_begun:
            what = "cannot exchange parameters between a backward pass and its step"
            refuse_order(what, needed="step() or zero_grad() before")
        self._outer.begin(partition)
        self._outer.exchange_all(partition, self._attempts)

    def offload(self, parameters: bool) -> None:
        """Free the device's memory, with or without that of the parameters."""
        self.partitions.offload(parameters)
        if self._outer is not None:
            self._outer.offload()

    def reload(self) -> None:
        self.partitions.reload()
        if self._outer is not None:
            self._outer.reload()

    def discard(self, *, forget_zeros: bool) -> None:
        with self.calls.call("zero_grad()"):
            if (partition := self.partitions.current) is None:
                return
            if partition.discard():
                self.partitions.of_this_step = None
            if forget_zeros:
                partition.gradients.zeros.clear()

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step and of memory; nothing before the first step."""
        if self._history.last is None:
            return {}
        of_activations = {} if self._activations is None else self._activations.figures()
        of_outer = {} if self._outer is None else self._outer.figures()
        return self._history.figures(self.partitions.custom_state()) | self._speed() | of_activations | of_outer

    def _speed(self) -> dict[str, float]:
        if self.throughput is None or self._history.last is None:
            return {}
        model = self._wrapped.model
        used = [each for _, each in self._wrapped.parameters()] if model is None else used_parameters(model)
        return self.throughput.figures(self._history.last.metrics["seconds"], self.ranks_of_all_hosts, used)

    def ledger(self) -> str:
        of_outer = "" if self._outer is None else self._outer.ledger()
        return self.partitions.now().ledger(self.partitions.custom_state()) + of_outer

    # --- The end ---

    def close(self, *, together: bool) -> None:
        """End the training, either together with all ranks, which gather the parameters, or on this rank alone."""
        if os.getpid() != self._process:  # a fork has none of the threads
            return
        if together and self.partitions.current is not None:
            self.partitions.current.require_not_gathered("cannot close the optimizer")
        try:
            if together:
                self.checkpoint.finish_pending()
        finally:
            self.checkpoint.snapshot = None
            self._end(together)

    def _end(self, together: bool) -> None:
        self._hooks.remove()
        self._wrapped.leave()
        if self._activations is not None:
            self._activations.remove()
        try:
            self.partitions.close(together=together)
        finally:
            if self._outer is not None:
                self._outer.close()
            self._ranks.leave()
