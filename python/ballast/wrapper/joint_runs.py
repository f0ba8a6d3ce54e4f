"""The runs of several optimizers, which are resumed together. In a round each optimizer makes one step, and its commit names
the round. A start resumes the newest round that all of them have."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from ballast import _core
from ballast.checks import refuse_order
from ballast.connecting import Group
from ballast.errors import Error
from ballast.wrapper.collectives import by_first_rank
from ballast.wrapper.options import WrapOptions

ALONE = _core.JointRound()
RUNS_ARE_LOST = ("B1009", "B3202")  # records are missing, or they are damaged


class Training(Protocol):
    """What commits the state of one optimizer."""

    def wait_for_commit(self) -> None: ...
    def set_round(self, joint_round: _core.JointRound) -> None: ...


class Lost(NamedTuple):
    """Why runs begin again, and the newest step that they had."""

    reason: str
    step: int


class JointRuns:
    """The rounds since this start."""

    def __init__(self, start: int, names: Sequence[str]):
        self._start = start
        self.names = [*names]
        self._rounds = 0
        self.current = self._next()
        self.stepped: set[int] = set()  # members that have made their step of the current round
        self._trainings: dict[int, weakref.ref[Training]] = {}

    def _next(self) -> _core.JointRound:
        self._rounds += 1
        return _core.JointRound(self._start, self._rounds, len(self.names))

    def enter(self, member: int, training: Training) -> None:
        self._trainings[member] = weakref.ref(training)

    def trainings(self, *, except_for: int | None = None) -> Iterator[Training]:
        """Yield what is not gone of them."""
        for member, reference in self._trainings.items():
            if member != except_for and (training := reference()) is not None:
                yield training

    def has_stepped(self, member: int) -> None:
        self.stepped.add(member)
        if len(self.stepped) == len(self.names):
            self.stepped.clear()
            self.current = self._next()

    def name_those_without_a_step(self) -> str:
        return ", ".join(name for member, name in enumerate(self.names) if member not in self.stepped)

    @contextmanager
    def changed_together(self) -> Iterator[None]:
        """Let all members commit a change of their state as one round, in the block."""
        self.require_no_step()
        joint_round = self._next()
        for training in self.trainings():
            training.set_round(joint_round)
        try:
            yield
        finally:
            for training in self.trainings():
                training.set_round(ALONE)

    def require_no_step(self, *members: int) -> None:
        """Refuse to change the state of these members, or of any, after their step of a round that is not complete: what they
        had before the round would be lost."""
        stepped = sorted(self.stepped & {*members} if members else self.stepped)
        if stepped:
            self._refuse_change(stepped[0])

    def _refuse_change(self, member: int) -> None:
        refuse_order(
            f'cannot change the state of run "{self.names[member]}": its optimizer has made a step, and others of the model '
            "have not yet",
            where=f"run {self.name_those_without_a_step()}",
            needed="step() of all optimizers before",
        )


class JointRun:
    """One of the runs."""

    def __init__(self, runs: JointRuns, member: int, chosen: _core.RunPoint, lost: Lost | None):
        self.runs = runs
        self.lost = lost
        self._member = member
        self._chosen: _core.RunPoint | None = chosen

    def enter(self, training: Training) -> None:
        """Let the other runs know what commits this one."""
        self.runs.enter(self._member, training)

    def set_options(self, options: _core.TrainingOptions, group: Group) -> None:
        """Set where the run is resumed. All ranks call it together."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:  # a later partition continues with the last commit
            chosen = _core.commits_of_run(group._core, options.directories, options.run)[0].point
        options.resume_at = chosen
        options.set_before_write(self._before_write)

    def _before_write(self, is_step: bool) -> None:
        """Wait until the others have committed their last step: this one overwrites records of the step before."""
        if not is_step:
            self.runs.require_no_step(self._member)
        for training in self.runs.trainings(except_for=self._member):
            training.wait_for_commit()

    @contextmanager
    def step(self) -> Iterator[_core.JointRound]:
        """Give the round in which the step is made inside the block."""
        runs = self.runs
        if self._member in runs.stepped:
            refuse_order(
                f'cannot make a step: the optimizer of run "{runs.names[self._member]}" has made one, and others of the model '
                "have not yet",
                where=f"run {runs.name_those_without_a_step()}",
                needed="one step() of each optimizer, and then the next one",
                remedy="Without run=, each optimizer may make steps as it likes.",
            )
        yield runs.current
        runs.has_stepped(self._member)


def name_of_member(run: str, member: int) -> str:
    """Return the name of the run of an optimizer, whose place in the list is given.

    >>> name_of_member("gan", 0), name_of_member("gan", 1)
    ('gan', 'gan-optimizer-1')
    """
    return run if member == 0 else f"{run}-optimizer-{member}"


def join_runs(group: Group, options: Sequence[WrapOptions]) -> list[JointRun]:
    """Choose where each optimizer resumes its run. All ranks call it together."""
    runs = JointRuns(by_first_rank(group, "begin runs", lambda: secrets.randbits(63)), [each.run for each in options])
    commits: list[list[_core.RunCommit]] = []
    points, lost = None, None
    try:
        for each in options:
            commits.append(_core.commits_of_run(group._core, each.directories, each.run))
        points = _core.newest_joint_points(commits, runs.names)
    except Error as error:
        if error.code not in RUNS_ARE_LOST or not options[0].checkpoint:
            raise
        lost = Lost(error.what_happened, max((commit.step for of_run in commits for commit in of_run), default=0))
    if points is None:
        points = [_core.RunPoint() for _ in options]
    return [JointRun(runs, member, point, lost) for member, point in enumerate(points)]
