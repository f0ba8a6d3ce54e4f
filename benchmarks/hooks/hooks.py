"""Measure the microseconds that Ballast adds to each module call, saved tensor and gradient of a model in torch.

The models have parameters of one element, so that nearly all time is that of Python and of torch's bookkeeping. All of them run
in one process with one thread of torch. The last case is in chunked_loss.py.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import ballast
import chunked_loss
import suite
import torch

BLOCKS = 16  # each is a unit in stage 3
PARAMETERS = 12  # parameters of a block, as in a transformer's
REPEATS = 10  # uses of each in a forward pass, so that opening a unit counts little


class Part(torch.nn.Module):
    """A module that returns its input, so that only its call takes time."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return batch


class Calls(torch.nn.Module):
    """Calls its modules."""

    events = PARAMETERS * REPEATS + 1

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([Part() for _ in range(PARAMETERS)])

    def forward(self, batch):
        for _ in range(REPEATS):
            for part in self.parts:
                batch = part(batch)
        return batch


class Lone(Part):
    """Is a unit of its own, which its call opens."""

    events = 1


class Products(torch.nn.Module):
    """Saves its input and a parameter in each product."""

    events = 2 * PARAMETERS * REPEATS

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(PARAMETERS)])

    def forward(self, batch):
        for weight in [*self.weights] * REPEATS:
            batch = batch * weight
        return batch


class Sums(Products):
    """Uses each parameter once, and saves nothing."""

    events = PARAMETERS

    def forward(self, batch):
        for weight in self.weights:
            batch = batch + weight
        return batch


class Times(NamedTuple):
    """Seconds of a step with two backward passes. The first begins the step, and looks up what is trained."""

    backward: float
    again_forward: float
    again_backward: float


class Subject:
    """A model, plain or wrapped."""

    def __init__(self, kind: type[torch.nn.Module], stage: int | None):
        blocks = [kind() for _ in range(BLOCKS)]
        self.model = torch.nn.Sequential(*blocks, torch.nn.Linear(1, 1))  # every model has gradients
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        units = (kind.__name__,) if stage == 3 else ()
        self.optimizer = (
            optimizer if stage is None else ballast.wrap(optimizer, self.model, stage=stage, tuning=ballast.Tuning(units=units))
        )
        self.batch = torch.ones(1, requires_grad=True)

    def step(self) -> Times:
        clock = time.thread_time  # other processes and the library's threads do not count
        loss = self.model(self.batch)
        first = clock()
        loss.backward()
        second = clock()
        loss = self.model(self.batch)
        third = clock()
        loss.backward()
        fourth = clock()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Times(second - first, third - second, fourth - third)


class Event(NamedTuple):
    """What is counted, in which model, and how its time is read."""

    name: str
    kind: type[torch.nn.Module]
    of: Callable[[Times], float]


EVENTS = [
    Event("module call", Calls, lambda times: times.again_forward),
    Event("module call that opens a unit", Lone, lambda times: times.again_forward),
    Event("saved tensor", Products, lambda times: times.again_forward + times.again_backward),
    Event("gradient arrival", Sums, lambda times: times.backward),
    Event("gradient arrival, added to another", Sums, lambda times: times.again_backward),
]


class Case(NamedTuple):
    event: Event
    stage: int

    @property
    def name(self) -> str:
        return f"{self.event.name}, stage {self.stage}"


CASES = [Case(event, stage) for event in EVENTS for stage in (0, 1, 2, 3)]


def measure(event: Event, stages: list[int], rounds: int) -> list[dict]:
    subjects = {stage: Subject(event.kind, stage) for stage in (None, *stages)}

    def taken(stage: int | None) -> float:
        gc.collect()
        gc.disable()  # as garbage of one subject is not the time of another
        times = subjects[stage].step()
        gc.enable()
        return event.of(times) / (event.kind.events * BLOCKS)

    seconds = suite.in_turn(subjects, taken, rounds, warm_up=3)
    return [row for stage in stages for row in rows_of(Case(event, stage), seconds[stage], seconds[None])]


def rows_of(case: Case, ours: list[float], plain: list[float]) -> list[dict]:
    microseconds = lambda seconds: 1e6 * seconds
    added = statistics.median(our - their for our, their in zip(ours, plain, strict=True))
    return [
        suite.versus(case.name, "plain torch", "us", ours, plain, value_of=microseconds),
        suite.line(f"{case.name}: added", microseconds(added), "us"),
    ]


def main() -> None:
    parser = suite.parser_of("hooks", __doc__, rounds=100)
    parser.add_argument("--processes", type=int, default=5, help="trainings with each loss of many words (%(default)s)")
    options = suite.choose(parser, [*(case.name for case in CASES), chunked_loss.NAME], str)
    cases = [case for case in CASES if case.name in options.cases]
    torch.set_num_threads(1)
    for event in dict.fromkeys(case.event for case in cases):
        suite.emit("hooks", measure(event, [case.stage for case in cases if case.event == event], options.rounds))
    if chunked_loss.NAME in options.cases:
        suite.emit("hooks", chunked_loss.measure(options.processes))


if __name__ == "__main__":
    main()
