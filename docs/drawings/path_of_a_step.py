"""Draw the calls from `optimizer.step()` to a lane: python3 docs/drawings/path_of_a_step.py [FILE]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from drawing import Drawing


class Hop(NamedTuple):
    """A call: its function, the file that defines it, and its decision."""

    function: str
    file: str
    decision: str


HOPS = (
    Hop("WrappedOptimizer.step", "python/ballast/torch/optimizer.py", "runs the closure; reads the loss scale"),
    Hop("Training.step", "python/ballast/torch/training/training.py", "refuses state that changed since the backward pass"),
    Hop("Partition.step", "python/ballast/torch/training/partition.py", "agrees with all ranks whether there are gradients"),
    Hop("TrainingBinding::step", "python/bindings/training.cpp", "releases Python's lock; holds its exceptions"),
    Hop("Training::step", "zero/training.cpp", "orders agreement, updates and the next step"),
    Hop("Scheduler::issue_rest", "zero/engine/scheduler.h", "hands each operation to its lane, with its waits"),
    Hop("LaneThread::add", "zero/engine/lanes.h", "runs the lane's operations in order"),
)
LANGUAGES = (("Python", HOPS[:3]), ("binding", HOPS[3:4]), ("C++", HOPS[4:]))
ROW = 44
TOP = 54
LEFT = 96


def draw() -> Drawing:
    """Return the drawing: a row for each call, grouped by language."""
    drawing = Drawing(820, TOP + ROW * len(HOPS) + 12, "The calls from optimizer.step() to a lane")
    drawing.text(24, 30, "optimizer.step()", "code")
    row = 0
    for language, hops in LANGUAGES:
        drawing.text(24, TOP + ROW * row + 20, language, "quiet")
        for hop in hops:
            top = TOP + ROW * row
            drawing.box(LEFT, top, 232, 30, "for-a-time" if language == "binding" else "line")
            drawing.text(LEFT + 12, top + 20, hop.function, "code")
            drawing.text(LEFT + 252, top + 20, hop.decision)
            if hop is not HOPS[-1]:
                drawing.line(LEFT + 116, top + 30, LEFT + 116, top + ROW)
            row += 1
    return drawing


if __name__ == "__main__":
    draw().write(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("path-of-a-step.svg"))
