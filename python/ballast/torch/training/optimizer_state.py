"""The optimizer's state outside a partition: before the partition has it, and of frozen parameters."""

from __future__ import annotations

import logging

from ballast.torch.training.model_and_optimizer import ModelAndOptimizer
from ballast.torch.training.partition import Partition
from ballast.torch.updates.shown_state import is_current_state, read_of
from ballast.torch.updates.updates import State, Updates, steps_in

log = logging.getLogger("ballast")


class OptimizerState:
    """Holds the state outside a partition, and shows all state in optimizer.state."""

    def __init__(self, given: ModelAndOptimizer, updates: Updates):
        self._given = given
        self._updates = updates
        self.loaded: State | None = None  # for the next partition
        self.frozen_state: State = {}  # of parameters that are frozen now
        self._unbegun: State | None = None  # state that could not be written to the partition yet

    def is_current(self, state: State) -> bool:
        """Return whether the state was read from here, so that loading it changes nothing."""
        return is_current_state(state, self._given.optimizer.state)

    def load(self, state: State) -> None:
        """Keep state for the partition of the next step: full state, or this rank's shard."""
        self.loaded, self._unbegun = read_of(state), None
        self.show(self.loaded)

    def load_changed(self, partition: Partition) -> None:
        """Load optimizer.state if the user has removed or replaced something in it."""
        changed = self._updates.changed_state(self._given.optimizer, partition)
        if self.loaded is None and changed is not None:
            self.loaded = read_of(changed)

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
        return None if self.loaded is None else max(steps_in(self.loaded).values(), default=0)

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
        self.loaded = self._unbegun = None

    def begin_empty(self, partition: Partition, frozen_state: State) -> None:
        """Begin with zeros, which a checkpoint replaces."""
        self.frozen_state = frozen_state
        self.show(frozen_state)
        self._updates.begin(self._given.optimizer, partition, {})

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
