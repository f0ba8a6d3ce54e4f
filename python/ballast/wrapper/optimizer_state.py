"""The optimizer's state where no partition has it: before it begins there, and of parameters that are frozen."""

from __future__ import annotations

from ballast.wrapper.partition import Partition
from ballast.wrapper.state import is_what_is_there, read_of
from ballast.wrapper.updates import State, Updates, steps_in
from ballast.wrapper.wrapped import Wrapped


class OptimizerState:
    """Shows in optimizer.state what there is, whether a partition has it or not."""

    def __init__(self, wrapped: Wrapped, updates: Updates):
        self._wrapped = wrapped
        self._updates = updates
        self.loaded: State | None = None  # waits for the partition
        self.aside: State = {}  # of parameters that are frozen now
        self._unbegun: State | None = None  # what a partition could not begin with

    def is_there(self, state: State) -> bool:
        """Return whether this was read from here, and would change nothing."""
        return is_what_is_there(state, self._wrapped.optimizer.state)

    def load(self, state: State) -> None:
        """Take all of it, or this rank's part of it, over to the partition of the next step."""
        self.loaded, self._unbegun = read_of(state), None
        self.show(self.loaded)

    def load_what_is_left(self, partition: Partition) -> None:
        """Take over what there is in optimizer.state, if something was taken out of it."""
        left = self._updates.left_of_state(self._wrapped.optimizer, partition)
        if self.loaded is None and left is not None:
            self.loaded = read_of(left)

    def has_changed(self, partition: Partition) -> bool:
        return self._updates.left_of_state(self._wrapped.optimizer, partition) is not None

    @property
    def steps_of_loaded(self) -> int | None:
        return None if self.loaded is None else max(steps_in(self.loaded).values(), default=0)

    def take_out(self, partition: Partition) -> State:
        """Return what is not in the partition's memory: all of it, on every rank."""
        return {**self.aside, **self._updates.take_out(self._wrapped.optimizer, partition)}

    # --- Into a partition ---

    def begin(self, partition: Partition, state: State) -> None:
        """Write the state to the partition, and set aside what it has no parameters of."""
        self._unbegun = state
        now = {id(member.parameter) for member in partition.members}
        self.aside = {key: values for key, values in state.items() if key not in now}
        self.show(self.aside)
        self._updates.begin(self._wrapped.optimizer, partition, state)
        self._unbegun = None

    def begin_again(self, partition: Partition) -> None:
        """The same, of what it could not begin with."""
        if self._unbegun is not None:
            self.begin(partition, self._unbegun)

    def forget(self) -> None:
        """A checkpoint brings other state."""
        self.loaded = self._unbegun = None

    def begin_empty(self, partition: Partition, aside: State) -> None:
        """Begin with zeros, which a checkpoint replaces."""
        self.aside = aside
        self.show(aside)
        self._updates.begin(self._wrapped.optimizer, partition, {})

    def show(self, state: State) -> None:
        optimizer = self._wrapped.optimizer
        optimizer.state.clear()
        for _, parameter in self._wrapped.parameters():
            if id(parameter) in state:
                optimizer.state[parameter] = state[id(parameter)]

    def leave(self) -> None:
        """The partition goes: what is in optimizer.state would be read from there, and keeps it."""
        self._updates.leave()
        if (optimizer := self._wrapped.optimizer_if_alive) is not None:
            optimizer.state.clear()
