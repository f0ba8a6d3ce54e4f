"""Write SVG and HTML: shapes, text, axes with round ticks, panels of memory against throughput, and documents. They can be read
on light and on dark screens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import shorten

COLOURS = {  # values: the colour on light screens, and that on dark ones
    "ground": ("#ffffff", "#161b22"),
    "ink": ("#1f2933", "#e6edf3"),
    "quiet": ("#5f6c7b", "#9aa7b4"),
    "rule": ("#c3ccd6", "#3d4855"),
    "grid": ("#e9edf1", "#232b35"),
    "searched": ("#a9b4c0", "#566373"),
    "chosen": ("#0f766e", "#2dd4bf"),
    "limit": ("#c2410c", "#fb923c"),
    "forward": ("#3b82c4", "#58a6e6"),
    "backward": ("#0f766e", "#2dab9b"),
    "step": ("#d39218", "#dba63a"),
    "earlier": ("#eed9a6", "#6b5730"),
    "waits": ("#f5c4ab", "#6e3520"),
}
DARK = "  @media (prefers-color-scheme: dark)"
FONT = 'system-ui, "Segoe UI", Helvetica, Arial, sans-serif'
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(words: str) -> str:
    """Return text for XML and HTML, without the characters that XML cannot have.

    >>> escaped("a<b\\x00")
    'a&lt;b\ufffd'
    """
    return escape(NOT_IN_XML.sub("\ufffd", words))


def style() -> str:
    """Return the style sheet of all drawings. The reader's system chooses between the colours."""
    light, dark = ("".join(_classes(name, pair[i]) for name, pair in COLOURS.items()) for i in (0, 1))
    return f"{light}  text {{ font: 13px {FONT} }}\n  .bold {{ font-weight: 600 }}\n{DARK} {{\n{dark}  }}\n"


def _classes(name: str, colour: str) -> str:
    return f"  .{name} {{ fill: {colour} }} .{name}-line {{ stroke: {colour}; fill: none }}\n"


def variables(*, dark: bool) -> str:
    """Return the colours as variables of a style sheet."""
    return "; ".join(f"--{name}: {pair[dark]}" for name, pair in COLOURS.items())


class Drawing:
    """Collects shapes. Coordinates are pixels from the upper left corner; styles are names of COLOURS."""

    def __init__(self, width: float, height: float, label: str):
        self.width, self.height, self._label = width, height, label
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "ink", anchor: str = "start") -> None:
        self._shapes.append(f'<text x="{x:.4g}" y="{y:.4g}" class="{style}" text-anchor="{anchor}">{escaped(words)}</text>')

    def box(self, x: float, y: float, size: tuple[float, float], style: str, title: str = "") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(size[0], 0.7):.1f}" height="{size[1]:.1f}"'
        self._shapes.append(f'<rect {place} class="{style}"{_tag_end("rect", title)}')

    def dot(self, x: float, y: float, radius: float, style: str, title: str = "") -> None:
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{style}"{_tag_end("circle", title)}')

    def line(self, points: Sequence[tuple[float, float]], style: str, *, width: float = 1, dashes: str = "") -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._shapes.append(f'<path d="M{path}" class="{style}-line" stroke-width="{width:g}"{dashed}/>')

    def area(self, points: Sequence[tuple[float, float]], style: str, *, opacity: float = 1) -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._shapes.append(f'<path d="M{path}Z" class="{style}" fill-opacity="{opacity:g}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Write names from left to right, each after a dot of its style."""
        for style, words in entries:
            self.dot(x + 5, y + 4, 4, style)
            self.text(x + 16, y + 8, words, "quiet")
            x += legend_width([(style, words)])

    def svg(self, *, alone: bool) -> str:
        """Return the drawing as a file of its own, or as a part of a page that has the style sheet."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escaped(self._label)}">'
        ground = f'<rect width="{self.width:g}" height="{self.height:g}" class="ground"/>'
        return "\n".join([head, *([f"<style>\n{style()}</style>", ground] if alone else []), *self._shapes, "</svg>\n"])


def legend_width(entries: Sequence[tuple[str, str]]) -> float:
    return sum(40 + 6.6 * len(words) for _, words in entries)


def _tag_end(tag: str, title: str) -> str:
    return f"><title>{escaped(title)}</title></{tag}>" if title else "/>"


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels."""

    high: float  # the value at `end`
    begin: float
    end: float
    low: float = 0  # the value at `begin`

    def at(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Return values at round distances, and their text.

        >>> Axis(84, 0, 100).ticks(5)
        [(0.0, '0'), (20.0, '20'), (40.0, '40'), (60.0, '60'), (80.0, '80')]
        >>> Axis(9.2, 0, 100, low=7.9).ticks(3)
        [(8.0, '8.0'), (8.5, '8.5'), (9.0, '9.0')]
        """
        step = round_step((self.high - self.low) / about)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step * (1 - 1e-9)), math.floor(self.high / step * (1 + 1e-9))
        return [(i * step, f"{i * step:,.{decimals}f}") for i in range(first, last + 1)]


@dataclass(frozen=True)
class Chart:
    drawing: Drawing
    across: Axis
    up: Axis

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.across.at(x), self.up.at(y)


def draw_scales(drawing: Drawing, across: Axis, up: Axis, names: tuple[str, str], *, whole: bool = False) -> None:
    """Draw the numbers of two axes and their names, and lines of a grid for the one that goes up. With `whole`, only whole
    numbers are across."""
    for value, words in up.ticks(6):
        drawing.line([(across.begin, up.at(value)), (across.end, up.at(value))], "grid" if value else "rule")
        drawing.text(across.begin - 8, up.at(value) + 4, words, "quiet", "end")
    for value, words in across.ticks(9):
        if not whole or value == int(value):
            drawing.line([(across.at(value), up.begin), (across.at(value), up.begin + 5)], "rule")
            drawing.text(across.at(value), up.begin + 20, words.partition(".")[0] if whole else words, "quiet", "middle")
    drawing.text(across.begin - 68, up.end - 10, names[1], "ink")
    drawing.text(across.begin, up.begin + 46, names[0], "ink")


def round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least as large.

    >>> round_step(0.03), round_step(16.8), round_step(5)
    (0.05, 20.0, 5.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next((power * times for times in (1, 2, 5) if power * times >= least * (1 - 1e-9)), power * 10)


# --- HTML ---

STYLE = f"""\
  :root {{ color-scheme: light dark; {variables(dark=False)} }}
{DARK} {{ :root {{ {variables(dark=True)} }} }}
  body {{ font: 15px/1.5 {FONT} }}
"""
RULES = """\
  body { margin: 0; background: var(--ground); color: var(--ink) }
  main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 48px }
  h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere }
  h2 { font-size: 18px; margin: 40px 0 12px; padding-top: 16px; border-top: 1px solid var(--grid) }
  p { margin: 4px 0 12px; color: var(--quiet) }
  dl { display: flex; flex-wrap: wrap; gap: 12px 40px; margin: 24px 0 0 }
  dt { font-size: 13px; color: var(--quiet) }
  dd { margin: 0; font-size: 20px; font-weight: 600 }
  svg { display: block; max-width: 100%; height: auto }
  table { border-collapse: collapse; margin-top: 16px; font-size: 14px }
  th, td { padding: 4px 20px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid) }
  th { font-weight: 400; color: var(--quiet) }
  th:last-child, td:last-child { text-align: left; white-space: normal; padding-right: 0 }
  tr.chosen { color: var(--chosen); font-weight: 600 }
  .wide, pre { overflow-x: auto }
  pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0 }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """Return a document with this title above parts of HTML."""
    body = "\n".join([f"<h1>{escaped(title)}</h1>", *parts])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width"/>
<title>{escaped(title)}</title>
<style>
{STYLE}{RULES}{style()}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def figures_list(figures: Mapping[str, str]) -> str:
    """Return figures in large letters, each below its name."""
    entries = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in figures.items())
    return f"<dl>{''.join(entries)}</dl>"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]], *, chosen: int | None = None) -> str:
    """Return a table. `chosen` is the number of a line that stands out."""
    cells = ["".join(f"<th>{escaped(head)}</th>" for head in heads)]
    cells += ["".join(f"<td>{escaped(cell)}</td>" for cell in line) for line in lines]
    marks = ["", *(' class="chosen"' if number == chosen else "" for number in range(len(lines)))]
    rows = "\n".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, cells, strict=True))
    return f'<div class="wide"><table>\n{rows}\n</table></div>'


# --- Panels of memory against throughput ---

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
