"""Draw memory against throughput of what was measured: a numbered dot for each system, whose names are listed below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from ballast.tools.markup import Axis, Drawing, draw_scales, round_step

WIDTH, LEFT, RIGHT, TOP, HEIGHT, LINE = 760, 92, 736, 92, 296, 20  # pixels
BELOW = 70  # pixels of the numbers below an axis
MIB = 1 << 20
LONGEST = 104  # characters of a line


@dataclass(frozen=True)
class Point:
    """What one system reached."""

    name: str
    memory_bytes: float
    tokens_per_second: float
    is_coloured: bool

    def describe(self) -> str:
        return f"{self.name}: {self.tokens_per_second:,.0f} tokens/s, {self.memory_bytes / MIB:,.0f} MiB"


@dataclass(frozen=True)
class Panel:
    """The systems that train one model. A dashed line is a limit of their speed, if there is one."""

    heading: str
    note: str
    points: Sequence[Point]
    memory: str = "memory of the largest rank"
    limit: tuple[str, float] | None = None  # its name, and tokens a second

    @property
    def height(self) -> float:
        return TOP + HEIGHT + BELOW + LINE * len(self.points)


def draw_panels(label: str, panels: Sequence[Panel]) -> Drawing:
    """Draw panels one below the other."""
    drawing = Drawing(WIDTH, sum(panel.height for panel in panels), label)
    top = 0.0
    for panel in panels:
        _draw(drawing, top, panel)
        top += panel.height
    return drawing


def _draw(drawing: Drawing, top: float, panel: Panel) -> None:
    most = max(point.memory_bytes for point in panel.points)
    unit, words = (MIB << 10, "GiB") if most >= 4096 * MIB else (MIB, "MiB")
    fastest = max([*(point.tokens_per_second for point in panel.points), *([panel.limit[1]] if panel.limit else [])])
    across = Axis(1.08 * most / unit, LEFT, RIGHT)
    up = Axis(fastest + round_step(fastest / 10), top + TOP + HEIGHT, top + TOP)
    drawing.text(24, top + 28, shorten(panel.heading, LONGEST, placeholder="..."), "bold ink")
    drawing.text(24, top + 48, panel.note, "quiet")
    draw_scales(drawing, across, up, (f"{panel.memory}, {words}", "tokens/s, all ranks"))
    if panel.limit:
        name, speed = panel.limit
        drawing.line([(LEFT, up.at(speed)), (RIGHT, up.at(speed))], "limit", width=1.5, dashes="6 4")
        drawing.text(RIGHT, up.at(speed) - 6, f"{name} {speed:,.0f}", "limit", "end")
    for number, point in enumerate(panel.points, start=1):
        x, y = across.at(point.memory_bytes / unit), up.at(point.tokens_per_second)
        style = "chosen" if point.is_coloured else "quiet"
        drawing.dot(x, y, 5, style if point.is_coloured else "searched", point.describe())
        drawing.text(x + 8, y - 6, f"{number}", f"bold {style}")
        drawing.text(24, up.begin + 60 + LINE * number, f"{number}", f"bold {style}")
        drawing.text(48, up.begin + 60 + LINE * number, point.describe(), "ink")
