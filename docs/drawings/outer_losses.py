"""Draw the losses of data parallelism and of DiLoCo over steps, over seconds and over the bytes that a host has sent, from
recorded trainings. Write outer-losses.svg, or the named file; a second name is that of the file of trainings."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from drawing import RESULTS, Drawing  # this finds the modules of benchmarks/

from suite import read_rows  # isort: skip

RECORD = RESULTS / "hosts-losses.jsonl"
LEFT, WIDTH, BETWEEN = 70, 290, 66  # pixels
TOP, HEIGHT, APART = 84, 210, 104
TICKS = 4

Row = dict[str, Any]  # a training, as benchmarks/hosts/losses.py writes it


class Quantity(NamedTuple):
    """A column of a curve, for the axis across."""

    title: str
    column: int
    unit: float
    is_logarithmic: bool


STEPS = Quantity("steps", 0, 1, False)
QUANTITIES = (
    STEPS,
    Quantity("seconds of the steps", 2, 1, False),
    Quantity("MB that a host has sent", 3, 1e6, True),
)


def scheme_of(row: Row) -> str:
    return str(row["case"]).rpartition(": ")[2].partition(", seed")[0]


def means_of_seeds(rows: list[Row]) -> list[Row]:
    """Return a row for each scheme and setting, whose curve is the mean of those of all seeds."""
    by_case: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_case.setdefault((str(row["case"]).partition(", seed")[0], str(row["setting"])), []).append(row)
    mean = lambda points: [sum(column) / len(column) for column in zip(*points, strict=True)]
    curve = lambda alike: [mean(points) for points in zip(*(row["curve"] for row in alike), strict=True)]
    return [{"case": case, "setting": setting, "curve": curve(alike)} for (case, setting), alike in by_case.items()]


def model_of(row: Row) -> str:
    return str(row["case"]).rpartition(": ")[0].rpartition(", ")[2]


def position(value: float, least: float, most: float, is_logarithmic: bool) -> float:
    """Return where a value is between two others, from 0 to 1."""
    if not is_logarithmic:
        return (value - least) / (most - least)
    return (math.log10(max(value, least)) - math.log10(least)) / (math.log10(most) - math.log10(least))


def draw_panel(drawing: Drawing, corner: tuple[float, float], rows: list[Row], quantity: Quantity, schemes: list[str]) -> None:
    left, top = corner
    losses = [point[1] for row in rows for point in row["curve"][1:]]
    low, high = min(losses) - 0.05, max(losses) + 0.05
    amounts = [point[quantity.column] / quantity.unit for row in rows for point in row["curve"][1:]]
    most = max(amounts)
    least = 10 ** math.floor(math.log10(max(min(amounts), most / 1e4))) if quantity.is_logarithmic else 0.0
    for part in range(TICKS + 1):
        y = top + HEIGHT * part / TICKS
        drawing.line(left, y, left + WIDTH, y)
        drawing.text(left - 8, y + 5, f"{high - (high - low) * part / TICKS:.2f}", "quiet", "end")
        share = part / TICKS
        value = least * (most / least) ** share if quantity.is_logarithmic else most * share
        words = f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
        drawing.text(left + WIDTH * share, top + HEIGHT + 20, words, "quiet", "middle")
    drawing.text(left + WIDTH / 2, top + HEIGHT + 40, quantity.title, "quiet", "middle")
    for row in rows:
        points = row["curve"][1:]
        amounts = [point[quantity.column] / quantity.unit for point in points]
        xs = [left + WIDTH * position(each, least, most, quantity.is_logarithmic) for each in amounts]
        ys = [top + HEIGHT * position(point[1], high, low, False) for point in points]
        drawing.curve(xs, ys, schemes.index(scheme_of(row)))


def draw(record: Path = RECORD) -> Drawing:
    rows = means_of_seeds(read_rows(record))
    settings = list(dict.fromkeys(str(row["setting"]) for row in rows))
    schemes = list(dict.fromkeys(map(scheme_of, rows)))
    below = TOP + len(settings) * (HEIGHT + APART)
    drawing = Drawing(LEFT + 3 * WIDTH + 2 * BETWEEN + 24, below + 46, "Losses of data parallelism and of DiLoCo")
    drawing.text(24, 30, "Validation loss of a GPT on two hosts, joined by 100 Mbit/s", "title")
    for number, setting in enumerate(settings):
        there = [row for row in rows if row["setting"] == setting]
        top = TOP + number * (HEIGHT + APART)
        drawing.text(24, top - 22, f"{model_of(there[0])} parameters: {setting}", "bold")
        for column, quantity in enumerate(QUANTITIES):
            draw_panel(drawing, (LEFT + column * (WIDTH + BETWEEN), top), there, quantity, schemes)
    for number, scheme in enumerate(schemes):
        x = 24 + number * 205
        drawing.curve([x, x + 24], [below - 15, below - 15], number)
        drawing.text(x + 32, below - 10, scheme, "quiet")
    words = "Each curve is the mean of the recorded seeds: benchmarks/results/hosts-losses.jsonl."
    drawing.text(24, below + 22, words, "quiet")
    return drawing


if __name__ == "__main__":
    to, record = [*sys.argv[1:3], *[str(Path(__file__).with_name("outer-losses.svg")), str(RECORD)][len(sys.argv[1:3]) :]]
    draw(Path(record)).write(Path(to))
