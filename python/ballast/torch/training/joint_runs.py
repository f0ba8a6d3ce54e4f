"""The runs of several optimizers, which are resumed together. In a round each optimizer makes one step, and its commit names
the round. A start resumes the newest round that all of them have."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """What the runs of a start have in common: the current round, in which each of them makes one step."""

    def __init__(self, start: int, count: int):
        self._start, self._count = start, count
        self._rounds = 0
        self.current = self.next_round()
        self.members: list[JointRun] = []

    def next_round(self) -> _core.JointRound:
        self._rounds += 1
        return _core.JointRound(self._start, self._rounds, self._count)

    def trainings(self, *, except_for: JointRun | None = None) -> list[Committing]:
        found = (member.training() for member in self.members if member is not except_for)
        return [training for training in found if training is not None]

    def without_step(self) -> str:
        return _names_of(member for member in self.members if not member.has_stepped)

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

    def require_no_step(self, *members: JointRun) -> None:
        """Refuse to change the state of these members, or of any, after their step of a round that is not complete: their
        state of the round before would be lost."""
        if stepped := [member for member in members or self.members if member.has_stepped]:
            refuse_order(
                f"cannot change the state of run {_names_of(stepped)} between the steps of a round: run "
                f"{self.without_step()} has not made its step yet",
                needed="step() of all optimizers before the change",
            )


class JointRun:
    """The run of one of the optimizers."""

    def __init__(self, runs: JointRuns, name: str, resume_at: _core.RunPoint, lost: Lost | None):
        self.runs = runs
        self.name = name
        self.lost = lost
        self.resume_at = resume_at  # the point where the next partition continues
        self.training: Callable[[], Committing | None] = lambda: None  # a weak reference, once it has one
        self.has_stepped = False  # in the current round. Then a backward pass that updates parameters has been refused
        self.is_closed = False
        runs.members.append(self)

    def set_options(self, options: _core.TrainingOptions) -> None:
        options.resume_at = self.resume_at
        options.set_before_write(self._before_write)

    def _before_write(self, is_step: bool) -> None:
        """Wait until the others have committed their last step: this one overwrites records of the step before."""
        if not is_step:
            self.runs.require_no_step(self)
        for training in self.runs.trainings(except_for=self):
            training.wait_for_commit()

    def require_others(self) -> None:
        """Refuse to continue without one of the others: its run would lack the later rounds."""
        if closed := [member for member in self.runs.members if member.is_closed]:
            refuse_order(
                f'cannot make a step of run "{self.name}": run {_names_of(closed)}, resumed with it, is closed',
                needed="all optimizers of the list until the end of the training",
            )

    def require_turn(self) -> None:
        """Refuse a second step of a round."""
        if self.has_stepped:
            others = self.runs.without_step()
            refuse_order(
                f'cannot make another step of run "{self.name}" in this round: run {others} has not made its step yet',
                needed="one step() of each optimizer, and then the next round",
                remedy="Without run=, each optimizer may make steps as it likes.",
            )

    @contextmanager
    def step(self) -> Iterator[_core.JointRound]:
        """Yield the current round, and note at the end of the block that this member has made its step of it."""
        runs = self.runs
        self.require_turn()
        yield runs.current
        self.has_stepped = True
        if all(member.has_stepped for member in runs.members):
            for member in runs.members:
                member.has_stepped = False
            runs.current = runs.next_round()


def _names_of(members: Iterable[JointRun]) -> str:
    return ", ".join(f'"{member.name}"' for member in members)


def name_of_member(run: str, member: int) -> str:
    """Return the name of the run of an optimizer, whose place in the list is given.

    >>> name_of_member("gan", 0), name_of_member("gan", 1)
    ('gan', 'gan-optimizer-1')
    """
    return run if member == 0 else f"{run}-optimizer-{member}"


def join_runs(group: Group, options: Sequence[WrapOptions]) -> list[JointRun]:
    """Choose where each optimizer resumes its run. All ranks call it together."""
    runs = JointRuns(by_first_rank(group, "begin runs", lambda: secrets.randbits(63)), len(options))
    names = [each.run.name for each in options]
    points, lost = _chosen(group, options, names)
    points = [_core.RunPoint() for _ in options] if points is None else points
    return [JointRun(runs, name, point, lost) for name, point in zip(names, points)]


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
