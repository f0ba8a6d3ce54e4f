"""Draw the timeline of a simulated step: a row for each lane, and a box for each operation, or for many short ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ballast import _core
from ballast.tools.markup import Axis, Drawing

WIDTH, ROW, TOP = 1080, 28, 40
LEFT, RIGHT = 96, WIDTH - 64
NARROWEST = 1 / 800  # of a step: shorter boxes are merged with their neighbours, which bounds the size of the drawing
LEGEND = {"forward": "forward", "backward": "backward", "step": "update", "earlier": "of the step before"}


@dataclass
class Box:
    """Operations of a lane with no gap that can be seen between them. Times are seconds."""

    begin: float
    end: float
    busy: float = 0
    count: int = 0
    styles: dict[str, float] = field(default_factory=dict)  # seconds by style
    kinds: dict[str, None] = field(default_factory=dict)  # in order
    units: dict[str, None] = field(default_factory=dict)

    def add(self, entry: _core.TimelineEntry, begin: float, end: float) -> None:
        self.end = end
        self.busy += end - begin
        self.count += 1
        self.styles[_style(entry)] = self.styles.get(_style(entry), 0.0) + end - begin
        self.kinds[_kind(entry)] = None
        if entry.unit:
            self.units[entry.unit] = None

    def joins(self, entry: _core.TimelineEntry, begin: float, shortest: float) -> bool:
        """Return whether the entry belongs into this box: it follows at once, and does the same, or the box is too
        narrow."""
        if begin - self.end >= shortest:
            return False
        same = self.kinds.keys() == {_kind(entry)} and self.units.keys() <= {entry.unit} and [*self.styles] == [_style(entry)]
        return same or self.end - self.begin < shortest

    def describe(self) -> str:
        units = [*self.units]
        names = f" {units[0]}" if len(units) == 1 else f" {units[0]} to {units[-1]}" if units else ""
        many = f", {self.count} operations" if self.count > 1 else ""
        return f"{', '.join(self.kinds)}{names}{many}: {_milliseconds(self.busy)} ms, at {_milliseconds(self.begin)} ms"


def boxes_of(entries: Iterable[_core.TimelineEntry], seconds: float) -> dict[str, list[Box]]:
    """Return the boxes of each lane, cut at the ends of the step."""
    lanes: dict[str, list[Box]] = {lane.name: [] for lane in _core.Lane}
    for entry in entries:
        begin, end = max(entry.begin, 0.0), min(entry.end, seconds)
        boxes = lanes[entry.lane.name]
        if not boxes or not boxes[-1].joins(entry, begin, seconds * NARROWEST):
            boxes.append(Box(begin, end))
        boxes[-1].add(entry, begin, end)
    return lanes


def draw_timeline(entries: Sequence[_core.TimelineEntry], seconds: float) -> Drawing:
    """Draw a step of this many seconds."""
    lanes = boxes_of(entries, seconds)
    bottom = TOP + ROW * len(lanes)
    drawing = Drawing(WIDTH, bottom + 46, "Timeline of one step")
    factor, unit = (1, "s") if seconds >= 2 else (1e3, "ms")
    shown = Axis(seconds * factor, LEFT, RIGHT)
    for value, words in shown.ticks(10):
        drawing.line([(shown.at(value), TOP), (shown.at(value), bottom + 5)], "grid")
        drawing.text(shown.at(value), bottom + 20, words, "quiet", "middle")
    drawing.text(LEFT, bottom + 40, f"time from the beginning of a step, {unit}", "ink")
    across = Axis(seconds, LEFT, RIGHT)
    _draw_waits(drawing, across, lanes["compute"])
    for number, (lane, boxes) in enumerate(lanes.items()):
        _draw_lane(drawing, across, TOP + ROW * number, lane, boxes)
    _draw_legend(drawing)
    return drawing


def _draw_lane(drawing: Drawing, across: Axis, top: int, lane: str, boxes: Sequence[Box]) -> None:
    busy = sum(box.busy for box in boxes) / across.high
    drawing.text(LEFT - 12, top + 18, lane, "ink" if boxes else "quiet", "end")
    drawing.text(WIDTH - 8, top + 18, _percent(busy) if boxes else "idle", "ink" if boxes else "quiet", "end")
    drawing.line([(LEFT, top + ROW - 2), (RIGHT, top + ROW - 2)], "grid")
    for box in boxes:
        size = (across.at(box.end) - across.at(box.begin), ROW - 8)
        drawing.box(across.at(box.begin), top + 4, size, max(box.styles, key=box.styles.__getitem__), box.describe())


def _draw_waits(drawing: Drawing, across: Axis, boxes: Sequence[Box]) -> None:
    """Mark the times in which the trainer waits."""
    ends = [0.0, *(box.end for box in boxes)]
    begins = [*(box.begin for box in boxes), across.high]
    for begin, end in zip(ends, begins, strict=True):
        if end - begin >= across.high * NARROWEST:
            size = (across.at(end) - across.at(begin), ROW - 8)
            words = f"the training waits: {_milliseconds(end - begin)} ms, at {_milliseconds(begin)} ms"
            drawing.box(across.at(begin), TOP + 4, size, "waits", words)


def _draw_legend(drawing: Drawing) -> None:
    x = float(LEFT)
    for style, words in [*LEGEND.items(), ("waits", "the training waits")]:
        drawing.box(x, 8, (14, 14), style)
        drawing.text(x + 20, 20, words, "quiet")
        x += 20 + 6.6 * len(words) + 24
    drawing.text(WIDTH - 8, 20, "busy", "quiet", "end")


def _style(entry: _core.TimelineEntry) -> str:
    return "earlier" if entry.of_earlier_step else entry.phase.name


def _kind(entry: _core.TimelineEntry) -> str:
    return entry.phase.name if entry.kind == "use" else entry.kind


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.01 else f"{part:.1%}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
