"""Draw what `ballast bench` measured: memory against throughput, a numbered dot for each case."""

from __future__ import annotations

from textwrap import shorten

from ballast.bench.cases import ALONE
from ballast.bench.results import Report, Row
from ballast.reports.svg import Axis, Drawing, draw_scales, round_step

WIDTH, LEFT, RIGHT, TOP, HEIGHT, LINE = 760, 92, 736, 92, 296, 20  # pixels
MIB = 1 << 20
LONGEST = 104  # characters of a line


def draw(report: Report) -> Drawing:
    """Draw the cases that did not fail. A dashed line is the speed of the model alone."""
    rows = [row for row in report.rows if not row.failure and row.name != ALONE]
    alone = report.row(ALONE)
    unit, words = (MIB << 10, "GiB") if max(row.memory_bytes for row in rows) >= 4096 * MIB else (MIB, "MiB")
    fastest = max(row.tokens_per_second for row in [*rows, *([alone] if alone else [])])
    across = Axis(1.08 * max(row.memory_bytes for row in rows) / unit, LEFT, RIGHT)
    up = Axis(fastest + round_step(fastest / 10), TOP + HEIGHT, TOP)
    drawing = Drawing(WIDTH, up.begin + 70 + LINE * len(rows), f"Memory and throughput of {report.model}")
    drawing.text(24, 28, shorten(report.heading(), LONGEST, placeholder="..."), "bold ink")
    busy = "; measured on a busy machine" if report.busy else ""
    drawing.text(24, 48, f"colour: Ballast; grey: other systems{busy}", "quiet")
    _draw_axes(drawing, across, up, words)
    if alone:
        y = up.at(alone.tokens_per_second)
        drawing.line([(LEFT, y), (RIGHT, y)], "limit", width=1.5, dashes="6 4")
        drawing.text(RIGHT, y - 6, f"{ALONE} {alone.tokens_per_second:,.0f}", "limit", "end")
    for number, row in enumerate(rows, start=1):
        _draw_row(drawing, (across.at(row.memory_bytes / unit), up.at(row.tokens_per_second)), number, row)
        y = up.begin + 60 + LINE * number
        drawing.text(24, y, f"{number}", "bold chosen" if row.is_ballast else "bold quiet")
        drawing.text(48, y, _in_words(row), "ink")
    return drawing


def _draw_axes(drawing: Drawing, across: Axis, up: Axis, unit: str) -> None:
    draw_scales(drawing, across, up)
    drawing.text(24, up.end - 10, "tokens/s, all ranks", "ink")
    drawing.text(across.begin, up.begin + 44, f"memory of the largest rank, {unit}", "ink")


def _draw_row(drawing: Drawing, place: tuple[float, float], number: int, row: Row) -> None:
    drawing.dot(*place, 5, "chosen" if row.is_ballast else "searched", _in_words(row))
    drawing.text(place[0] + 8, place[1] - 6, f"{number}", "bold chosen" if row.is_ballast else "bold quiet")


def _in_words(row: Row) -> str:
    return f"{row.name}: {row.tokens_per_second:,.0f} tokens/s, {row.memory_bytes / MIB:,.0f} MiB"
