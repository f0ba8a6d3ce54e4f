"""The helper of all drawings of this folder: an SVG with text and boxes that is readable on light and on dark pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
sys.path += [str(BENCHMARKS / name) for name in ("harness", "losses", "peers-training")]

# The reader's system chooses the light or the dark colours. A drawing paints its own background, so it stays readable on a site
# that the reader has switched to the other colours.
STYLE = """\
  svg { --ground: #ffffff; --ink: #1f2933; --quiet: #5f6c7b; --line: #c3ccd6; --ours: #0f766e; --theirs: #9aa8b6; }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #161b22; --ink: #e6edf3; --quiet: #9aa7b4; --line: #3d4855; --ours: #2dd4bf; --theirs: #667585; }
  }
  text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
  .ground { fill: var(--ground); }
  .title { font-size: 16px; font-weight: 600; }
  .bold { font-weight: 600; }
  .quiet { font-size: 13px; fill: var(--quiet); }
  .code { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
  .ours { fill: var(--ours); }
  .theirs { fill: var(--theirs); }
  .for-a-time { fill: none; stroke: var(--ours); stroke-width: 2; stroke-dasharray: 6 4; }
  .line { stroke: var(--line); fill: none; }
  .on-ours { fill: var(--ground); font-weight: 600; }
"""

# Colours of curves, which are told apart on light and on dark ground, also by most readers who confuse colours.
SERIES = ("#7f8c99", "#e69f00", "#009e73", "#d55e00", "#0072b2", "#56b4e9", "#cc79a7")


def path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys))


class Drawing:
    """Collects shapes; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, label: str):
        self._width, self._height, self._label = width, height, label
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{max(width, 1):.1f}" height="{height:g}"'
        self._shapes.append(f'<rect {place} rx="4" class="{style}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._shapes.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line"/>')

    def curve(self, xs: Sequence[float], ys: Sequence[float], series: int) -> None:
        """Draw a line through points in the colour of a series."""
        self._shapes.append(f'<path d="{path(xs, ys)}" fill="none" stroke="{SERIES[series]}" stroke-width="2"/>')

    def area(self, xs: Sequence[float], lower: Sequence[float], upper: Sequence[float], series: int) -> None:
        """Fill what lies between two lines, in the colour of a series."""
        around = path([*xs, *reversed(xs)], [*lower, *reversed(upper)])
        self._shapes.append(f'<path d="{around}Z" fill="{SERIES[series]}" fill-opacity="0.18"/>')

    def write(self, path: Path) -> None:
        size = f'viewBox="0 0 {self._width} {self._height}" width="{self._width}" height="{self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self._label)}">'
        ground = f'<rect class="ground" width="{self._width}" height="{self._height}" rx="8"/>'
        path.write_text("\n".join([head, f"<style>\n{STYLE}</style>", ground, *self._shapes, "</svg>\n"]))
