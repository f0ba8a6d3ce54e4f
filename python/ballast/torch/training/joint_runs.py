"""The runs of several optimizers, which are resumed together. In a round each optimizer makes one step, and its commit names
the round. A start resumes the newest round that all of them have."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ballast import _core
from ballast.checks import refuse_order
from ballast.errors import Error
from ballast.ranks import Group, by_first_rank
from ballast.wrap_options import WrapOptions

ALONE = _core.JointRound()
RUNS_ARE_LOST = ("B1009", "B3202")  # records are missing, or they are damaged
Lost = tuple[str, int | None]  # why runs begin again, and the newest step that is known of them


class Committing(Protocol):
    """A training that commits the state of one optimizer."""

    def wait_for_commit(self) -> None: ...
    def set_round(self, joint_round: _core.JointRound) -> None: ...


class JointRuns:
    """What the runs of a start have in common: the current round, and which of them have made their step of it."""

    def __init__(self, start: int, names: Sequence[str]):
        self._start = start
        self.names = [*names]
        self._rounds = 0
        self.current = self.next_round()
        self.stepped: set[int] = set()  # members
        self.closed: set[int] = set()
        self.registered: dict[int, weakref.ref[Committing]] = {}

    def next_round(self) -> _core.JointRound:
        self._rounds += 1
        return _core.JointRound(self._start, self._rounds, len(self.names))

    def trainings(self, *, except_for: int | None = None) -> Iterator[Committing]:
        for member, reference in self.registered.items():
            if member != except_for and (training := reference()) is not None:
                yield training

    def names_of(self, members: set[int]) -> str:
        return ", ".join(f'"{self.names[member]}"' for member in sorted(members))

    def names_without_step(self) -> str:
        return self.names_of({*range(len(self.names))} - self.stepped)

    @contextmanager
    def changed_together(self) -> Iterator[None]:
        """Commit the changes of all members inside the block as one round."""
        self.require_no_step()
        joint_round = self.next_round()
        for training in self.trainings():
            training.set_round(joint_round)
        try:
            yield
        finally:
            for training in self.trainings():
                training.set_round(ALONE)

    def require_no_step(self, *members: int) -> None:
        """Refuse to change the state of these members, or of any, after their step of a round that is not complete: their
        state of the round before would be lost."""
        stepped = self.stepped & {*members} if members else self.stepped
        if stepped:
            refuse_order(
                f"cannot change the state of run {self.names_of(stepped)} between the steps of a round: run "
                f"{self.names_without_step()} has not made its step yet",
                needed="step() of all optimizers before the change",
            )


class JointRun:
    """The run of one of the optimizers."""

    def __init__(self, runs: JointRuns, member: int, resume_at: _core.RunPoint, lost: Lost | None):
        self.runs = runs
        self.lost = lost
        self.resume_at = resume_at  # the point where the next partition continues
        self._member = member

    def register(self, training: Committing) -> None:
        self.runs.registered[self._member] = weakref.ref(training)

    def close(self) -> None:
        self.runs.closed.add(self._member)

    def set_options(self, options: _core.TrainingOptions) -> None:
        options.resume_at = self.resume_at
        options.set_before_write(self._before_write)

    def _before_write(self, is_step: bool) -> None:
        """Wait until the others have committed their last step: this one overwrites records of the step before."""
        if not is_step:
            self.runs.require_no_step(self._member)
        for training in self.runs.trainings(except_for=self._member):
            training.wait_for_commit()

    def require_others(self) -> None:
        """Refuse to continue without one of the others: its run would lack the later rounds."""
        if closed := self.runs.closed:
            refuse_order(
                f"cannot make a step of run {self._name}: run {self.runs.names_of(closed)}, resumed with it, is closed",
                needed="all optimizers of the list until the end of the training",
            )

    @property
    def _name(self) -> str:
        return self.runs.names_of({self._member})

    @property
    def has_stepped(self) -> bool:
        """Whether its step of the current round is made. Then a backward pass that updates parameters has been refused."""
        return self._member in self.runs.stepped

    def require_turn(self) -> None:
        """Refuse a second step of a round."""
        if self.has_stepped:
            others = self.runs.names_without_step()
            refuse_order(
                f"cannot make another step of run {self._name} in this round: run {others} has not made its step yet",
                needed="one step() of each optimizer, and then the next round",
                remedy="Without run=, each optimizer may make steps as it likes.",
            )

    @contextmanager
    def step(self) -> Iterator[_core.JointRound]:
        """Yield the current round, and note at the end of the block that this member has made its step of it."""
        runs = self.runs
        self.require_turn()
        yield runs.current
        runs.stepped.add(self._member)
        if len(runs.stepped) == len(runs.names):
            runs.stepped.clear()
            runs.current = runs.next_round()


def name_of_member(run: str, member: int) -> str:
    """Return the name of the run of an optimizer, whose place in the list is given.

    >>> name_of_member("gan", 0), name_of_member("gan", 1)
    ('gan', 'gan-optimizer-1')
    """
    return run if member == 0 else f"{run}-optimizer-{member}"


def join_runs(group: Group, options: Sequence[WrapOptions]) -> list[JointRun]:
    """Choose where each optimizer resumes its run. All ranks call it together."""
    runs = JointRuns(by_first_rank(group, "begin runs", lambda: secrets.randbits(63)), [each.run.name for each in options])
    points, lost = _chosen(group, options, runs.names)
    if points is None:
        points = [_core.RunPoint() for _ in options]
    return [JointRun(runs, member, point, lost) for member, point in enumerate(points)]


def _chosen(group: Group, options: Sequence[WrapOptions], names: list[str]) -> tuple[list[_core.RunPoint] | None, Lost | None]:
    """Return the commits to resume, and None if the runs begin. With a checkpoint they begin again if records are lost."""
    commits: list[list[_core.RunCommit]] = []
    failure: Error | None = None
    for each in options:
        try:
            commits.append(_core.commits_of_run(group, each.directories, each.run.name))
        except Error as error:
            failure = failure or error
    try:
        if failure is not None:
            raise failure
        return _core.newest_joint_points(commits, names), None
    except Error as error:
        if error.code not in RUNS_ARE_LOST or not options[0].run.checkpoint:
            raise
        steps = [commit.step for run_commits in commits for commit in run_commits]
        return None, (error.what_happened, max(steps, default=None))
    finally:
        failure = None  # its traceback refers to this frame
