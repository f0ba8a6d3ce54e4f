"""Draw the largest Llama that each system trains in 4 GiB of memory as bars, from the recorded runs. Write
largest-model.svg, or the named file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from drawing import RESULTS, Drawing  # this finds the modules of benchmarks/

import ladder  # isort: skip
from suite import read_rows  # isort: skip

LEFT, BARS, ROW, TOP = 490, 360, 44, 76  # pixels


class Rung(NamedTuple):
    """The largest model that a system has trained, and why it did not train the next one."""

    system: str
    model: ladder.Llama
    ended: str


def recorded() -> list[Rung]:
    cases = [row.get("case", "") for file in sorted(RESULTS.glob("ladder*.jsonl")) for row in read_rows(file)]
    rungs = []
    for system in ladder.SYSTEMS:
        *_, largest = (model for model in ladder.MODELS if f"{system.name}: {model.name}" in cases)
        larger = ladder.MODELS[ladder.MODELS.index(largest) + 1]
        begins = f"{system.name}: {larger.name}, "
        ended = next(case.removeprefix(begins) for case in cases if case.startswith(begins))
        rungs.append(Rung(system.name, largest, f"{larger.name}: {ended.partition(', which')[0]}"))
    return rungs


def draw() -> Drawing:
    rungs = recorded()
    largest = max(rung.model.parameters for rung in rungs)
    drawing = Drawing(LEFT + BARS + 130, TOP + ROW * len(rungs) + 40, "The largest model trained in 4 GiB of memory")
    drawing.text(24, 30, "The largest Llama that trains in 4 GiB of memory, in billions of parameters", "bold")
    drawing.text(24, 52, "one process, bf16 parameters, 128 tokens a step, memory and swap limited by the kernel", "quiet")
    for number, rung in enumerate(rungs):
        top = TOP + ROW * number
        is_ours = rung.system.startswith("Ballast")
        length = BARS * rung.model.parameters / largest
        drawing.text(LEFT - 12, top + 15, rung.system, "bold" if is_ours else "", "end")
        drawing.box(LEFT, top, length, 20, "ours" if is_ours else "theirs")
        drawing.text(LEFT + length + 8, top + 15, f"{rung.model.parameters / 1e9:.2f}")
        drawing.text(LEFT, top + 35, rung.ended, "quiet")
    note = "Recorded in benchmarks/results/ladder*.jsonl by ./run-benchmarks ladder."
    drawing.text(24, TOP + ROW * len(rungs) + 24, note, "quiet")
    return drawing


if __name__ == "__main__":
    draw().write(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("largest-model.svg"))
