"""Draw a golden program as lanes over time, into the .svg file of the same name: python3 docs/drawings/step_as_a_program.py

The durations are assumed; the waits are those of the program. Needs the standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve()
PROGRAM = HERE.parents[2] / "tests" / "plan" / "golden" / "stage3_nvme.txt"
DRAWING = HERE.with_suffix(".svg")

LANES = ["compute", "gather", "reduce", "download", "host", "upload", "disk"]
SECONDS = {"gather": 2.2, "reduce": 2.2, "clear": 0.4, "norm": 0.5, "agree": 0.8, "download": 0.7, "upload": 0.7}
SECONDS |= {"update": 1.2, "read": 1.3, "write": 1.3, "commit": 0.8, "use forward": 3.2, "use backward": 6.4}
SHORT = {"use forward": "forward", "use backward": "backward"}

STEPS = 4  # walked; the last but one is drawn, because steps overlap
COLOURS = ["#8fb8de", "#a8d5a2", "#f2c28b"]  # the colour of each unit
NO_UNIT = "#c9c9d6"
LEFT, TOP, ROW, SCALE = 84, 34, 40, 19.0

LINE = re.compile(r"%\d+ (\w+): (use \w+|\w+)(?: unit=(\d+))?(?: tile=(\d+))?.*?(?: after=(\S+))?")


@dataclass
class Op:
    """An operation of a program, as read from its line."""

    text: str
    lane: str
    kind: str
    unit: int | None
    tile: int | None
    waits: list[tuple[bool, int]] = field(default_factory=list)  # whether the operation is of the step before, and its number


def read_program(text: str) -> list[Op]:
    """Return the operations of a program."""
    ops = []
    for line in text.splitlines():
        if not line.startswith("%"):
            continue
        found = LINE.fullmatch(line)
        if not found:
            raise ValueError(f"cannot read the line: {line}")
        lane, kind, unit, tile, after = found.groups()
        waits = [(wait[0] == "^", int(wait[1:])) for wait in (after or "").split(",") if wait]
        ops.append(Op(line, lane, kind, int(unit) if unit else None, int(tile) if tile else None, waits))
    return ops


def schedule(ops: list[Op]) -> list[list[tuple[float, float]]]:
    """Return when each operation of each step begins and ends. It begins when the trainer has reached it, its lane is free,
    and the operations that it waits for have ended."""
    steps: list[list[tuple[float, float]]] = []
    lane_end = dict.fromkeys(LANES, 0.0)
    trainer = 0.0
    for _ in range(STEPS):
        spans: list[tuple[float, float]] = []
        for op in ops:
            begin = max(trainer, lane_end[op.lane])
            for of_last_step, index in op.waits:
                if not of_last_step or steps:
                    begin = max(begin, (steps[-1] if of_last_step else spans)[index][1])
            end = begin + SECONDS[op.kind]
            spans.append((begin, end))
            lane_end[op.lane] = end
            if op.kind.startswith("use") or op.kind == "agree":
                trainer = end
        steps.append(spans)
    return steps


def draw(text: str) -> str:
    """Return the drawing of a program."""
    ops = read_program(text)
    steps = schedule(ops)
    drawn = STEPS - 2
    begin = min(begin for op, (begin, _) in zip(ops, steps[drawn], strict=True) if op.kind == "use forward")
    end = max(end for _, end in steps[drawn])
    width = LEFT + (end - begin) * SCALE + 12
    height = TOP + ROW * len(LANES) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#fbfbfd"/>',
        f'<clipPath id="time"><rect x="{LEFT}" y="0" width="{(end - begin) * SCALE:.1f}" height="{height}"/></clipPath>',
    ]
    for row, lane in enumerate(LANES):
        middle = TOP + ROW * row + ROW / 2
        parts.append(f'<text x="{LEFT - 10}" y="{middle + 4:.0f}" text-anchor="end" fill="#333" font-size="12">{lane}</text>')
        parts.append(f'<path d="M{LEFT} {middle:.0f}H{width - 12:.0f}" stroke="#ddd"/>')
    parts.append('<g clip-path="url(#time)">')
    for step in (drawn - 1, drawn + 1, drawn):
        for op, span in zip(ops, steps[step], strict=True):
            if span[1] > begin and span[0] < end:
                parts.append(_box(op, span[0] - begin, span[1] - begin, pale=step != drawn))
    parts.append("</g>")
    agreed = next(end for op, (_, end) in zip(ops, steps[drawn], strict=True) if op.kind == "agree")
    parts.append(_mark(agreed - begin, height, "step() returns"))
    parts.append(f'<text x="{LEFT}" y="{height - 10}" fill="#333">')
    parts.append("Colour: the unit, 0, 1 or 2. Pale: the step before, the step after. Time runs to the right.</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _mark(at: float, height: float, text: str) -> str:
    x = LEFT + at * SCALE
    line = f'<path d="M{x:.1f} {TOP - 8}V{height - 30}" stroke="#b33" stroke-dasharray="4 3"/>'
    return line + f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#b33">{text}</text>'


def _box(op: Op, begin: float, end: float, *, pale: bool) -> str:
    x, y = LEFT + begin * SCALE, TOP + ROW * LANES.index(op.lane) + 6
    width = (end - begin) * SCALE
    colour = NO_UNIT if op.unit is None else COLOURS[op.unit % len(COLOURS)]
    name = SHORT.get(op.kind, op.kind)
    label = next((text for text in (name, name[0]) if len(text) * 6.2 + 2 < width), "")
    if op.kind in ("clear", "norm"):
        label = ""
    return (
        f'<g opacity="{0.35 if pale else 1}"><title>{escape(op.text)}</title>'
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 12}" rx="2" fill="{colour}" stroke="#555"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + ROW / 2 - 2:.0f}" text-anchor="middle" fill="#222">{label}</text></g>'
    )


if __name__ == "__main__":
    DRAWING.write_text(draw(PROGRAM.read_text()))
