"""Draw the losses of each state and gradient format over the steps, and their differences from fp32, from recorded runs.

Bands reach from the lowest to the highest seed. Only formats with all their seeds are drawn. Write format-losses.svg, or the
named file; a second name is that of the file of runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from drawing import RESULTS, Drawing  # this finds the modules of benchmarks/

from contest import SEEDS, Case, Contest, Finished  # isort: skip
from formats import CONTESTS  # isort: skip

RECORD = RESULTS / "formats.jsonl"
TITLE = "A GPT of 30M parameters in each state and gradient format: the mean of three seeds, from the lowest to the highest"
LEFT, WIDTH, BETWEEN = 84, 400, 96  # pixels
TOP, HEIGHT, APART = 76, 230, 84


class Band(NamedTuple):
    """The values of all seeds of a contender at the points of its curve."""

    number: int  # of the contender, whose colour it has
    steps: list[int]
    of_seeds: list[list[float]]

    def at_each_point(self, of: Callable[[Sequence[float]], float]) -> list[float]:
        return [of(values) for values in zip(*self.of_seeds)]


def bands_of(contest: Contest, finished: Finished) -> list[Band]:
    """Return the bands of the contenders that have all seeds."""
    bands = []
    for number, contender in enumerate(contest.contenders):
        rows = [finished[case] for case in (Case(contender, seed) for seed in SEEDS) if case in finished]
        if len(rows) == len(SEEDS):
            losses = [[loss for _, loss in row["curve"]] for row in rows]
            bands.append(Band(number, [step for step, _ in rows[0]["curve"]], losses))
    return bands


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
    """Draw a grid and the bands. `form` is that of the labels of values; with a sign, zero is in the middle."""
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
        xs = [across(step) for step in band.steps]
        drawing.area(xs, [*map(down, band.at_each_point(min))], [*map(down, band.at_each_point(max))], band.number)
    for band in bands:
        xs = [across(step) for step in band.steps]
        drawing.curve(xs, [*map(down, band.at_each_point(statistics.fmean))], band.number)


def draw_contest(drawing: Drawing, contest: Contest, bands: list[Band], left: float) -> None:
    if not bands:
        drawing.text(left, TOP + 20, f"{contest.task.name}: nothing is finished", "quiet")
        return
    draw_panel(drawing, (left, TOP), f"{contest.task.name}: validation loss over steps", bands, ".2f")
    reference, *others = bands
    if reference.number == 0 and others:
        compared = [differences(band, reference) for band in others]
        draw_panel(drawing, (left, TOP + HEIGHT + APART), "difference from fp32 with the same seed", compared, "+.3f")


def draw(record: Path = RECORD) -> Drawing:
    below = TOP + 2 * HEIGHT + APART + 60
    drawing = Drawing(LEFT + 2 * WIDTH + BETWEEN + 24, below + 108, "Loss curves of the state and gradient formats")
    drawing.text(24, 30, TITLE)
    drawn = set()
    for place, contest in enumerate(CONTESTS):
        bands = bands_of(contest, contest.read(record))
        draw_contest(drawing, contest, bands, LEFT + place * (WIDTH + BETWEEN))
        drawn |= {band.number for band in bands}
    for number, contender in enumerate(CONTESTS[0].contenders):
        x, y = 24 + (number % 3) * 320, below + 24 * (number // 3)
        drawing.curve([x, x + 26], [y - 5, y - 5], number)
        name = contender.partition(", ")[2]
        drawing.text(x + 34, y, name if number in drawn else f"{name}: unfinished", "quiet")
    drawing.text(24, below + 86, "State split has the bits of fp32. Recorded in benchmarks/results/formats.jsonl.", "quiet")
    return drawing


if __name__ == "__main__":
    to, record = [*sys.argv[1:3], *[str(Path(__file__).with_name("format-losses.svg")), str(RECORD)][len(sys.argv[1:3]) :]]
    draw(Path(record)).write(Path(to))
