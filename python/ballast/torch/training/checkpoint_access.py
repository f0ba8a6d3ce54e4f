"""The view of a training for saving and loading checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ballast import _core
from ballast.checks import refuse_order
from ballast.connecting import Group
from ballast.outer.optimizer import OuterOptimizer
from ballast.torch.training.metrics import StepHistory
from ballast.torch.training.partition import Partition
from ballast.torch.training.partitions import Partitions
from ballast.torch.updates.rules import options_to_set
from ballast.torch.updates.updates import State
from ballast.wrap_options import WrapOptions


class Pending(Protocol):
    """The part of a PendingSave that a training needs."""

    @property
    def is_settled(self) -> bool: ...
    def wait(self) -> None: ...


class CheckpointAccess:
    """Reads and changes a training, and knows the checkpoints that it has saved or loaded."""

    def __init__(self, partitions: Partitions, history: StepHistory, outer: OuterOptimizer | None):
        self._partitions = partitions
        self._history = history
        self.outer = outer
        self.checkpoints: dict[str, set[str]] = {}  # by directory: the folders that this training has saved or loaded
        self.pending: Pending | None = None  # the last save in the background
        self.snapshot: _core.Snapshot | None = None  # the memory of its copy, for the next one

    @property
    def group(self) -> Group:
        return self._partitions.factory.ranks.of_data

    @property
    def options(self) -> WrapOptions:
        return self._partitions.factory.options

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._partitions.wrapped.optimizer

    def parameters(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        return self._partitions.wrapped.parameters()

    def parameters_of_siblings(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters that other optimizers of the model have."""
        for sibling in self._partitions.wrapped.siblings():
            for _, parameter in sibling.parameters():
                yield parameter

    def names(self) -> dict[int, str]:
        return self._partitions.wrapped.names()

    def names_of_moments(self) -> list[tuple[_core.Moment, str]]:
        """Return the moments of a rule of the library."""
        return [] if self.has_custom_step else self._partitions.factory.updates.moments(self.optimizer)

    def names_of_stored_values(self) -> list[str]:
        """Return the values of each element that the library keeps for the optimizer's own step, in their order there."""
        return [name for _, name in self._partitions.factory.updates.moments(self.optimizer)] if self.has_custom_step else []

    @property
    def whole_values(self) -> frozenset[str]:
        """Names of the optimizer's own state that is never by element, whatever its shape is."""
        return self._partitions.factory.updates.whole_values

    @property
    def has_custom_step(self) -> bool:
        """Whether the optimizer's own step makes the updates, and its own state."""
        return self._partitions.factory.updates.custom_step is not None

    @property
    def frozen_state(self) -> State:
        """The state of parameters that are frozen now."""
        return self._partitions.state.frozen_state

    @property
    def steps(self) -> int:
        return self._partitions.steps

    @property
    def skipped(self) -> int:
        return self._history.skipped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._history.skipped = steps

    @property
    def outer_identity(self) -> str:
        return "" if self.outer is None else self.outer.identity

    def require_not_gathered(self, what: str) -> None:
        self._partitions.require_not_gathered(what)

    def partition_now(self) -> Partition:
        return self._partitions.now()

    def finish_pending(self) -> None:
        """Wait for the save in the background, unless the caller did so, and raise its error. All ranks call this together."""
        if self.pending is not None and not self.pending.is_settled:
            self.pending.wait()

    # --- Loading ---

    def require_loadable(self) -> None:
        """Refuse to load while parameters are gathered, or while none is trained: below stage 3 a partition has no others."""
        self.require_not_gathered("cannot load a checkpoint")
        if self.options.stage != 3 and not self._partitions.wrapped.trained():
            refuse_order(
                "cannot load a checkpoint: all parameters of the optimizer are frozen",
                needed="one that is trained; or stage 3",
                remedy="Load the checkpoint first, and freeze parameters after that.",
            )

    def require_changeable(self) -> None:
        """Refuse to change the state between the steps of the model's optimizers, if their runs are resumed together."""
        if (run := self._partitions.factory.joint_run) is not None:
            run.runs.require_no_step()

    def changed_together(self) -> AbstractContextManager[None]:
        """Return a block whose changes are committed as one round, if the model's optimizers have joint runs."""
        run = self._partitions.factory.joint_run
        return nullcontext() if run is None else run.runs.changed_together()

    def begin_from(self, made: dict[int, int], steps: int, frozen_state: State) -> Partition:
        """Return a partition that continues after `steps`. The caller writes the state to it, and then calls
        finish_loading(). `made` has the number of steps that have trained each parameter, by its id. All ranks call
        it together."""
        if self.outer is not None:
            self.outer.forget()
        return self._partitions.begin_from(made, steps, frozen_state)

    def options_to_set(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the options of the groups as a checkpoint brings them. Raise B1001 where the optimizer cannot use them."""
        return options_to_set(self.optimizer.param_groups, saved, self._partitions.factory.updates.rule)

    def install(self, partition: Partition, state: State) -> None:
        """Give the optimizer its own state, apart from what the library keeps of it."""
        self._partitions.factory.updates.install(self.optimizer, partition, state)

    def finish_loading(self) -> None:
        self._partitions.is_half_loaded = False
