"""The HTML page of a plan, and its drawings: memory against throughput, memory by owner, and the timeline of the simulated
step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ballast import _core
from ballast.planning.result import Plan, differences
from ballast.sizes import human_amount, human_count, human_size, human_time
from ballast.tools.markup import Axis, Chart, Drawing, document, draw_scales, escaped, figures_list, round_step, table

MARGIN, LEFT = 24, 92  # pixels
HEIGHT = 296  # the length of the axis
GIB = 1 << 30
BEYOND = 1.2  # memory that is shown, relative to the limit
FAR_BELOW = 0.3  # a part of the limit: if all need less, the axis ends before it
LONGEST = 100  # characters of a line

WIDTH, ROW, GAP = 1080, 24, 14  # the bars of memory
BARS, END = 230, 880  # pixels from the left: names before, sizes after

ABOUT_STEP = "Rank 0 of the simulated step. Steps overlap: updates may run during the next step. Point at a box for details."

LANE, TOP = 28, 40  # the height of a lane of the timeline, and pixels above the lanes
FIRST, LAST = 96, WIDTH - 64  # pixels from the left: the step begins and ends
NARROWEST = 1 / 800  # a part of a step: shorter boxes are merged with their neighbours, which bounds the drawing
LEGEND = {"forward": "forward", "backward": "backward", "step": "update", "earlier": "of the step before"}


# --- Memory against throughput ---


def _place(chart: Chart, plan: Plan) -> tuple[float, float]:
    """Return the place of a plan: GiB across, and tokens a second up."""
    return chart.place(_memory(plan), plan.tokens_per_second)


def draw_front(searched: Sequence[Plan], front: Sequence[Plan], chosen: Plan, *, titled: bool = True) -> Drawing:
    """Draw plans as dots. `searched` may contain plans that do not fit; `front` contains the chosen one."""
    limit = chosen.limit_of("device") / GIB
    shown = [plan for plan in searched if _memory(plan) <= BEYOND * limit]
    chart = _chart([*shown, *front], chosen, limit, titled=titled)
    draw_scales(chart.drawing, chart.across, chart.up, (f"memory of a {chosen.rank_device}, GiB", "tokens/s, all ranks"))
    _draw_limit(chart, limit)
    for plan in sorted(shown, key=lambda plan: plan.fits):
        chart.drawing.dot(*_place(chart, plan), 4, "searched" if plan.fits else "searched-line", describe(plan))
    points = [_place(chart, plan) for plan in front]
    joined = [point for i, point in enumerate(points) if all(point[0] < x for x, _ in points[:i])]
    chart.drawing.line(joined, "chosen", width=1.5)
    for plan in front:
        chart.drawing.dot(*_place(chart, plan), 4.5, "chosen", describe(plan))
    _draw_chosen(chart, chosen, limit)
    entries = [("chosen", "least memory for the throughput"), ("searched", "other placements")]
    entries += [("searched-line", "do not fit")] if any(not plan.fits for plan in shown) else []
    chart.drawing.legend(chart.across.begin - 68, chart.up.end - 40, entries)
    if hidden := len(searched) - len(shown):
        words = f"{hidden} {'needs' if hidden == 1 else 'need'} more memory than shown"
        chart.drawing.text(chart.across.end, chart.up.begin + 46, words, "quiet", "end")
    return chart.drawing


def _chart(plans: Sequence[Plan], chosen: Plan, limit: float, *, titled: bool) -> Chart:
    width, top = (760, 128) if titled else (1080, 60)
    drawing = Drawing(width, top + HEIGHT + 62, f"Memory and throughput of placements of {chosen.model}")
    if titled:
        drawing.text(MARGIN, 28, _cut(f"{chosen.model} on {chosen.ranks} x {chosen.gpu.upper()}"), "bold ink")
        drawing.text(MARGIN, 48, _cut(f"chosen: {chosen.where()}"), "quiet")
        drawing.text(MARGIN, 66, f"{chosen.formats()}; {_speed(chosen)}", "quiet")
    largest, fastest = max(map(_memory, plans)), max(plan.tokens_per_second for plan in plans)
    # The axis of memory ends a little beyond the limit, unless all points are far below it.
    end = 1.15 * largest if largest < FAR_BELOW * limit else 1.04 * max(largest, limit)
    across = Axis(end, LEFT if titled else LEFT - MARGIN, width - MARGIN if titled else width)
    return Chart(drawing, across, Axis(fastest + round_step(fastest / 10), top + HEIGHT, top))


def describe(plan: Plan) -> str:
    return f"{plan.where()}; {plan.formats()}{'' if plan.fits else ' (does not fit)'}: {_speed(plan)}"


def _speed(plan: Plan) -> str:
    cost = plan.cost_per_million_tokens
    words = f"{human_size(plan.bytes_in('device'))} of a {plan.rank_device}, {plan.tokens_per_second:,.0f} tokens/s"
    return f"{words}, {human_amount(cost)} per million tokens" if cost is not None else words


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def _memory(plan: Plan) -> float:
    return plan.bytes_in("device") / GIB


def _draw_limit(chart: Chart, limit: float) -> None:
    drawing, across, up = chart.drawing, chart.across, chart.up
    words = f"limit {human_size(round(limit * GIB))}"
    if limit > across.high:
        drawing.text(across.end, up.end - 10, f"{words}, to the right of this axis", "limit", "end")
        return
    drawing.line([(across.at(limit), up.end - 4), (across.at(limit), up.begin)], "limit", width=1.5, dashes="6 4")
    drawing.text(min(across.at(limit), across.end - 50), up.end - 10, words, "limit", "middle")


def _draw_chosen(chart: Chart, chosen: Plan, limit: float) -> None:
    """Mark the chosen plan. Its label stays to the left of the limit."""
    x, y = _place(chart, chosen)
    chart.drawing.dot(x, y, 6, "chosen", f"chosen: {describe(chosen)}")
    chart.drawing.dot(x, y, 9.5, "chosen-line")
    right = min(chart.across.at(limit), chart.across.end) - 34
    chart.drawing.text(max(min(x, right), chart.across.begin + 30), y - 16, "chosen", "bold chosen", "middle")


# --- Memory by owner ---


def draw_memory(plan: Plan) -> Drawing:
    """Draw a bar for each tier that is used, and one for each row of its memory. Bars of a tier end at its limit."""
    tiers = {tier: plan.rows_of(tier) for tier, owners in plan.memory.items() if owners}
    height = sum(ROW * (1 + len(rows)) + GAP for rows in tiers.values())
    drawing = Drawing(WIDTH, height, f"Memory of one rank of {plan.model}")
    top = 0
    for tier, rows in tiers.items():
        total = plan.bytes_in(tier)
        scale = Axis(max(plan.limit_of(tier), total), BARS, END)
        sizes = f"{human_size(total)} of {human_size(plan.limit_of(tier))}"
        drawing.box(BARS, top + 5, (END - BARS, ROW - 10), "grid")
        _draw_bar(drawing, top, scale, (tier, total), ("bold ink", "chosen", sizes))
        for number, (row, size) in enumerate(rows.items(), start=1):
            _draw_bar(drawing, top + ROW * number, scale, (row, size), ("quiet", "searched", human_size(size)))
        top += ROW * (1 + len(rows)) + GAP
    return drawing


def _draw_bar(drawing: Drawing, top: int, scale: Axis, entry: tuple[str, int], styles: tuple[str, str, str]) -> None:
    (name, size), (words, bar, amount) = entry, styles
    drawing.text(BARS - 12, top + 16, name, words, "end")
    drawing.box(BARS, top + 5, (scale.at(size) - BARS, ROW - 10), bar, f"{name}: {amount}")
    drawing.text(END + 12, top + 16, amount, words)


# --- The timeline of the simulated step: a row for each lane, a box for each operation or for many short ones ---


@dataclass
class Box:
    """Operations of a lane with no gap that can be seen between them. Times are seconds."""

    begin: float
    end: float
    busy: float = 0
    count: int = 0
    styles: dict[str, float] = field(default_factory=dict)  # seconds by style
    kinds: dict[str, None] = field(default_factory=dict)  # names in order
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
    lanes: dict[str, list[Box]] = {lane.name: [] for lane in _core.Lane}
    for entry in entries:
        begin, end = max(entry.begin, 0.0), min(entry.end, seconds)
        boxes = lanes[entry.lane.name]
        if not boxes or not boxes[-1].joins(entry, begin, seconds * NARROWEST):
            boxes.append(Box(begin, end))
        boxes[-1].add(entry, begin, end)
    return lanes


def draw_timeline(entries: Sequence[_core.TimelineEntry], seconds: float) -> Drawing:
    lanes = boxes_of(entries, seconds)
    bottom = TOP + LANE * len(lanes)
    drawing = Drawing(WIDTH, bottom + 46, "Timeline of one step")
    factor, unit = (1, "s") if seconds >= 2 else (1e3, "ms")
    shown = Axis(seconds * factor, FIRST, LAST)
    for value, words in shown.ticks(10):
        drawing.line([(shown.at(value), TOP), (shown.at(value), bottom + 5)], "grid")
        drawing.text(shown.at(value), bottom + 20, words, "quiet", "middle")
    drawing.text(FIRST, bottom + 40, f"time from the beginning of a step, {unit}", "ink")
    across = Axis(seconds, FIRST, LAST)
    _draw_waits(drawing, across, lanes["compute"])
    for number, (lane, boxes) in enumerate(lanes.items()):
        _draw_lane(drawing, across, TOP + LANE * number, lane, boxes)
    drawing.legend(FIRST, 10, [*LEGEND.items(), ("waits", "the training waits")])
    drawing.text(WIDTH - 8, 20, "busy", "quiet", "end")
    return drawing


def _draw_lane(drawing: Drawing, across: Axis, top: int, lane: str, boxes: Sequence[Box]) -> None:
    busy = sum(box.busy for box in boxes) / across.high
    part = f"{busy:.0%}" if busy >= 0.01 else f"{busy:.1%}"
    drawing.text(FIRST - 12, top + 18, lane, "ink" if boxes else "quiet", "end")
    drawing.text(WIDTH - 8, top + 18, part if boxes else "idle", "ink" if boxes else "quiet", "end")
    drawing.line([(FIRST, top + LANE - 2), (LAST, top + LANE - 2)], "grid")
    for box in boxes:
        size = (across.at(box.end) - across.at(box.begin), LANE - 8)
        drawing.box(across.at(box.begin), top + 4, size, max(box.styles, key=box.styles.__getitem__), box.describe())


def _draw_waits(drawing: Drawing, across: Axis, boxes: Sequence[Box]) -> None:
    ends = [0.0, *(box.end for box in boxes)]
    begins = [*(box.begin for box in boxes), across.high]
    for begin, end in zip(ends, begins, strict=True):
        if end - begin >= across.high * NARROWEST:
            size = (across.at(end) - across.at(begin), LANE - 8)
            words = f"the training waits: {_milliseconds(end - begin)} ms, at {_milliseconds(begin)} ms"
            drawing.box(across.at(begin), TOP + 4, size, "waits", words)


def _style(entry: _core.TimelineEntry) -> str:
    return "earlier" if entry.of_earlier_step else entry.phase.name


def _kind(entry: _core.TimelineEntry) -> str:
    return entry.phase.name if entry.kind == "use" else entry.kind


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


# --- The page ---


def page(searched: Sequence[Plan], front: Sequence[Plan], chosen: Plan) -> str:
    """Return the page of the chosen plan; `draw_front()` explains the others."""
    title = f"{chosen.model} on {chosen.ranks} x {chosen.gpu.upper()}"
    cost = ["cost per million tokens"] if chosen.price is not None else []
    heads = [chosen.rank_device, "host", "drives", "step", "tokens/s", *cost, "placement"]
    number = next(number for number, plan in enumerate(front) if plan is chosen)
    sections = [
        _figures(chosen),
        "<h2>Memory and throughput</h2>",
        draw_front(searched, front, chosen, titled=False).svg(alone=False),
        table(heads, front_rows(front, [*chosen.memory]), chosen=number),
        "<h2>Memory of one rank</h2>",
        draw_memory(chosen).svg(alone=False),
        "<h2>One step</h2>",
        f"<p>{ABOUT_STEP}</p>",
        draw_timeline(chosen.timeline(), chosen.seconds).svg(alone=False),
        "<h2>The plan as text</h2>",
        f"<pre>{escaped(chosen.text())}</pre>",
        f"<p>Planned by Ballast {_core.version}. Nothing has run: times are simulated with the rates above.</p>",
    ]
    lead = f"<p>{escaped(chosen.where())}; {escaped(chosen.formats())}</p>"
    return document(title, [lead, *sections])


def _figures(plan: Plan) -> str:
    figures = {
        "step": human_time(plan.seconds),
        "tokens/s, all ranks": f"{plan.tokens_per_second:,.0f}",
        f"memory of a {plan.rank_device}": f"{human_size(plan.bytes_in('device'))} of {human_size(plan.limit_of('device'))}",
    }
    if plan.cost_per_million_tokens is not None:
        figures["cost per million tokens"] = human_amount(plan.cost_per_million_tokens)
    if plan.train_tokens is not None and plan.training_seconds is not None:
        figures[f"training of {human_count(plan.train_tokens)} tokens"] = human_time(plan.training_seconds)
    if plan.training_cost is not None:
        figures["cost of the training"] = human_amount(plan.training_cost)
    return figures_list(figures)


def front_rows(front: Sequence[Plan], tiers: Sequence[str]) -> list[list[str]]:
    """Return the cells of a table with one plan on each line: memory in these tiers, time, cost if there is a price, and what
    differs between the plans."""
    rows = []
    for plan, how in zip(front, differences(front), strict=True):
        sizes = [human_size(plan.bytes_in(tier)) if plan.bytes_in(tier) else "-" for tier in tiers]
        cost = plan.cost_per_million_tokens
        amount = [] if cost is None else [human_amount(cost)]
        rows.append([*sizes, human_time(plan.seconds), f"{plan.tokens_per_second:,.0f}", *amount, how])
    return rows
