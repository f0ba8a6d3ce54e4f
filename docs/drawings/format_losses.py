"""Draw the losses of each state and gradient format over the steps, and their differences from fp32, from recorded runs.

Bands reach from the lowest to the highest seed. Only variants with all their seeds are drawn. Write format-losses.svg, or the
named file; a second name is that of the file of runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from drawing import RESULTS, Drawing  # this finds the modules of benchmarks/

import formats  # isort: skip
from contest import SEEDS  # isort: skip
from formats import REFERENCE, TASKS, VARIANTS, Case, Task, Variant  # isort: skip

RECORD = RESULTS / "formats.jsonl"
TITLE = "A GPT of 30M parameters in each state and gradient format: the mean of three seeds, from the lowest to the highest"
LEFT, WIDTH, BETWEEN = 84, 400, 96  # pixels
TOP, HEIGHT, APART = 76, 230, 84


class Band(NamedTuple):
    """The values of all seeds of a variant at the points of its curve."""

    variant: Variant
    steps: list[int]
    of_seeds: list[list[float]]

    def at_each_point(self, of: Callable[[Sequence[float]], float]) -> list[float]:
        return [of(values) for values in zip(*self.of_seeds)]


def finished_variants(task: Task, finished: formats.Finished) -> list[Variant]:
    return [variant for variant in VARIANTS if all(Case(task, variant, seed) in finished for seed in SEEDS)]


def losses(task: Task, variant: Variant, finished: formats.Finished) -> Band:
    rows = [finished[Case(task, variant, seed)] for seed in SEEDS]
    return Band(variant, [step for step, _ in rows[0]["curve"]], [[loss for _, loss in row["curve"]] for row in rows])


def differences(band: Band, reference: Band) -> Band:
    """Return the differences of losses with the same seed."""
    pairs = zip(band.of_seeds, reference.of_seeds)
    return band._replace(of_seeds=[[ours - theirs for ours, theirs in zip(*pair)] for pair in pairs])


class Axis(NamedTuple):
    """Maps values of a range to pixels."""

    low: float
    high: float
    begin: float
    length: float

    def __call__(self, value: float) -> float:
        return self.begin + self.length * (value - self.low) / (self.high - self.low)


def range_of(bands: list[Band], is_around_zero: bool) -> tuple[float, float]:
    values = [value for band in bands for of_seed in band.of_seeds for value in of_seed]
    low, high = min(values), max(values)
    if is_around_zero:
        high = max(high, -low)
        low = -high
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def draw_panel(drawing: Drawing, corner: tuple[float, float], title: str, bands: list[Band], form: str) -> None:
    """Draw a grid and a band for each variant. `form` is that of the labels of values; with a sign, zero is in the middle."""
    left, top = corner
    drawing.text(left, top - 14, title, "bold")
    low, high = range_of(bands, is_around_zero="+" in form)
    down = Axis(high, low, top, HEIGHT)
    across = Axis(0, bands[0].steps[-1], left, WIDTH)
    for part in range(5):
        value = down.low + (down.high - down.low) * part / 4
        drawing.line(left, down(value), left + WIDTH, down(value))
        drawing.text(left - 8, down(value) + 5, format(value, form), "quiet", "end")
        step = across.high * part / 4
        drawing.text(across(step), top + HEIGHT + 20, f"{step:,.0f}", "quiet", "middle")
    for band in bands:
        series = VARIANTS.index(band.variant)
        xs = [across(step) for step in band.steps]
        drawing.area(xs, [*map(down, band.at_each_point(min))], [*map(down, band.at_each_point(max))], series)
    for band in bands:
        xs = [across(step) for step in band.steps]
        drawing.curve(xs, [*map(down, band.at_each_point(statistics.fmean))], VARIANTS.index(band.variant))


def draw_task(drawing: Drawing, task: Task, finished: formats.Finished, left: float) -> None:
    variants = finished_variants(task, finished)
    bands = [losses(task, variant, finished) for variant in variants]
    if not bands:
        drawing.text(left, TOP + 20, f"{task.name}: no variant is finished", "quiet")
        return
    draw_panel(drawing, (left, TOP), f"{task.name}: validation loss over steps", bands, ".2f")
    if REFERENCE in variants and len(bands) > 1:
        reference = bands[variants.index(REFERENCE)]
        compared = [differences(band, reference) for band in bands if band.variant != REFERENCE]
        draw_panel(drawing, (left, TOP + HEIGHT + APART), "difference from fp32 with the same seed", compared, "+.3f")


def draw(record: Path = RECORD) -> Drawing:
    finished = formats.read(record)
    below = TOP + 2 * HEIGHT + APART + 60
    drawing = Drawing(LEFT + 2 * WIDTH + BETWEEN + 24, below + 108, "Loss curves of the state and gradient formats")
    drawing.text(24, 30, TITLE)
    for number, task in enumerate(TASKS):
        draw_task(drawing, task, finished, LEFT + number * (WIDTH + BETWEEN))
    drawn = {variant for task in TASKS for variant in finished_variants(task, finished)}
    for number, variant in enumerate(VARIANTS):
        x, y = 24 + (number % 3) * 320, below + 24 * (number // 3)
        drawing.curve([x, x + 26], [y - 5, y - 5], number)
        drawing.text(x + 34, y, variant.name if variant in drawn else f"{variant.name}: unfinished", "quiet")
    drawing.text(24, below + 86, "State split has the bits of fp32. Recorded in benchmarks/results/formats.jsonl.", "quiet")
    return drawing


if __name__ == "__main__":
    to, record = [*sys.argv[1:3], *[str(Path(__file__).with_name("format-losses.svg")), str(RECORD)][len(sys.argv[1:3]) :]]
    draw(Path(record)).write(Path(to))
