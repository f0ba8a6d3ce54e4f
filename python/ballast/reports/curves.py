"""Draw values over the steps of a training: lines, bands between two lines, and stacked areas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.reports.svg import Axis, Drawing, round_step

WIDTH, HEIGHT, TOP = 1080, 200, 34
LEFT, RIGHT = 84, WIDTH - 12
MOST_POINTS = 360  # of a line: more steps are drawn as means of several
STYLES = ("chosen", "forward", "step", "limit", "searched", "backward", "earlier", "ink", "quiet")


@dataclass(frozen=True)
class Curve:
    """Values by step. `low` and `high` bound the values that a mean stands for."""

    name: str
    steps: Sequence[float]
    means: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def curve_of(name: str, values: Mapping[int, Sequence[float]]) -> Curve:
    """Return the curve of values by step, of one or several ranks.

    >>> curve_of("loss", {1: [4.0, 2.0], 2: [1.0]})
    Curve(name='loss', steps=[1.0, 2.0], means=[3.0, 1.0], low=[2.0, 1.0], high=[4.0, 1.0])
    """
    steps = sorted(step for step, at in values.items() if at)
    size = max(1, -(-len(steps) // MOST_POINTS))
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    held = [[value for step in part for value in values[step]] for part in parts]
    return Curve(
        name,
        [sum(part) / len(part) for part in parts],
        [sum(part) / len(part) for part in held],
        [min(part) for part in held],
        [max(part) for part in held],
    )


def draw_curves(label: str, curves: Sequence[Curve], *, from_zero: bool = True, marks: Sequence[float] = ()) -> Drawing:
    """Draw each curve as a line, in front of the band of the values that it stands for. `marks` are steps at which the training
    resumed."""
    low = min(0.0 if from_zero else min(curve.low) for curve in curves)
    chart = _chart(label, curves, low, max(max(curve.high) for curve in curves))
    for style, curve in zip(STYLES, curves):
        upper = chart.points(curve.steps, curve.high)
        chart.drawing.area([*upper, *reversed(chart.points(curve.steps, curve.low))], style, opacity=0.2)
    for style, curve in zip(STYLES, curves):
        chart.line(curve.steps, curve.means, style)
    return _finished(chart, [curve.name for curve in curves], marks)


def draw_stacked(label: str, curves: Sequence[Curve], *, marks: Sequence[float] = ()) -> Drawing:
    """Draw the means of curves with the same steps as areas, one above the other."""
    sums = [0.0] * len(curves[0].steps)
    chart = _chart(label, curves, 0.0, max(map(sum, zip(*(curve.means for curve in curves)))))
    for style, curve in zip(STYLES, curves):
        above = [a + b for a, b in zip(sums, curve.means)]
        upper = chart.points(curve.steps, above)
        chart.drawing.area([*upper, *reversed(chart.points(curve.steps, sums))], style, opacity=0.7)
        chart.line(curve.steps, above, style)
        sums = above
    return _finished(chart, [curve.name for curve in curves], marks)


@dataclass(frozen=True)
class Chart:
    """A drawing with its axes: steps across, values up."""

    drawing: Drawing
    across: Axis
    up: Axis

    def points(self, steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
        return [(self.across.at(step), self.up.at(value)) for step, value in zip(steps, values)]

    def line(self, steps: Sequence[float], values: Sequence[float], style: str) -> None:
        points = self.points(steps, values)
        self.drawing.line(points, style, width=1.5)
        if len(points) == 1:
            self.drawing.dot(*points[0], 3, style)


def _chart(label: str, curves: Sequence[Curve], low: float, high: float) -> Chart:
    first, last = min(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    high = high if high > low else low + (abs(low) or 1.0)
    room = round_step((high - low) / 10)
    drawing = Drawing(WIDTH, TOP + HEIGHT + 44, label)
    up = Axis(high + room, TOP + HEIGHT, TOP, low=low - room if low else 0.0)
    across = Axis(last if last > first else first + 1, LEFT, RIGHT, low=first)
    for value, words in up.ticks(5):
        drawing.line([(LEFT, up.at(value)), (RIGHT, up.at(value))], "grid")
        drawing.text(LEFT - 8, up.at(value) + 4, words, "quiet", "end")
    for value, words in across.ticks(10):
        if value == int(value):
            drawing.line([(across.at(value), up.begin), (across.at(value), up.begin + 5)], "rule")
            drawing.text(across.at(value), up.begin + 20, words.partition(".")[0], "quiet", "middle")
    drawing.text(LEFT, 18, label, "ink")
    drawing.text(RIGHT, up.begin + 38, "step", "quiet", "end")
    return Chart(drawing, across, up)


def _finished(chart: Chart, names: Sequence[str], marks: Sequence[float]) -> Drawing:
    """Draw the marks, and write the names of the curves at the upper right, if there are several."""
    for step in marks:
        x = chart.across.at(step)
        chart.drawing.line([(x, chart.up.end), (x, chart.up.begin)], "limit", dashes="4 4")
        chart.drawing.text(x, chart.up.begin + 38, f"resumed at {step:,.0f}", "limit", "middle")
    x = float(RIGHT)
    for style, name in reversed(list(zip(STYLES, names)) if len(names) > 1 else []):
        chart.drawing.text(x, 18, name, "quiet", "end")
        x -= 6.6 * len(name) + 20
        chart.drawing.box(x, 8, (12, 12), style)
        x -= 16
    return chart.drawing
