"""Draw memory of a GPU against throughput: all placements, the front of the best ones, and the chosen plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.reports.svg import Axis, Drawing, draw_scales, round_step
from ballast.result import Plan
from ballast.sizes import human_amount, human_size

MARGIN, LEFT = 24, 92  # pixels
HEIGHT = 296  # of the axis
GIB = 1 << 30
BEYOND = 1.2  # memory that is shown, relative to the limit
FAR_BELOW = 0.3  # of the limit: if all need less, the axis ends before the limit
LONGEST = 100  # characters of a line


@dataclass(frozen=True)
class Chart:
    """A drawing with its axes: GiB across, and tokens a second up."""

    drawing: Drawing
    across: Axis
    up: Axis

    def place(self, plan: Plan) -> tuple[float, float]:
        return self.across.at(_memory(plan)), self.up.at(plan.tokens_per_second)

    def dot(self, plan: Plan, radius: float, style: str, title: str) -> None:
        self.drawing.dot(*self.place(plan), radius, style, title)


def draw_front(searched: Sequence[Plan], front: Sequence[Plan], chosen: Plan, *, titled: bool = True) -> Drawing:
    """Draw plans as dots. `searched` may contain plans that do not fit; `front` contains the chosen one."""
    limit = chosen.limit_of("device") / GIB
    shown = [plan for plan in searched if _memory(plan) <= BEYOND * limit]
    chart = _chart([*shown, *front], chosen, limit, titled=titled)
    _draw_axes(chart, chosen.rank_device)
    _draw_limit(chart, limit)
    for plan in sorted(shown, key=lambda plan: plan.fits):
        chart.dot(plan, 4, "searched" if plan.fits else "searched-line", in_words(plan))
    points = [chart.place(plan) for plan in front]
    joined = [point for i, point in enumerate(points) if all(point[0] < x for x, _ in points[:i])]
    chart.drawing.line(joined, "chosen", width=1.5)
    for plan in front:
        chart.dot(plan, 4.5, "chosen", in_words(plan))
    _draw_chosen(chart, chosen, limit)
    _draw_legend(chart, has_larger=any(not plan.fits for plan in shown))
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
    most = max(plan.tokens_per_second for plan in plans)
    across = Axis(_end_of_memory(plans, limit), LEFT if titled else LEFT - MARGIN, width - MARGIN if titled else width)
    return Chart(drawing, across, Axis(most + round_step(most / 10), top + HEIGHT, top))


def in_words(plan: Plan) -> str:
    """Describe a plan in one line."""
    return f"{plan.where()}; {plan.formats()}{'' if plan.fits else ' (does not fit)'}: {_speed(plan)}"


def _speed(plan: Plan) -> str:
    cost = plan.cost_per_million_tokens
    words = f"{human_size(plan.bytes_in('device'))} of a {plan.rank_device}, {plan.tokens_per_second:,.0f} tokens/s"
    return f"{words}, {human_amount(cost)} per million tokens" if cost is not None else words


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def _memory(plan: Plan) -> float:
    return plan.bytes_in("device") / GIB


def _end_of_memory(plans: Sequence[Plan], limit: float) -> float:
    """Return the end of the axis of memory: a little more than the limit, unless all points are far below it."""
    most = max(_memory(plan) for plan in plans)
    return 1.15 * most if most < FAR_BELOW * limit else 1.04 * max(most, limit)


def _draw_axes(chart: Chart, device: str) -> None:
    drawing, across, up = chart.drawing, chart.across, chart.up
    draw_scales(drawing, across, up)
    drawing.text(across.begin - 68, up.end - 10, "tokens/s, all ranks", "ink")
    drawing.text(across.begin, up.begin + 46, f"memory of a {device}, GiB", "ink")


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
    x, y = chart.place(chosen)
    chart.dot(chosen, 6, "chosen", f"chosen: {in_words(chosen)}")
    chart.dot(chosen, 9.5, "chosen-line", "")
    right = min(chart.across.at(limit), chart.across.end) - 34
    chart.drawing.text(max(min(x, right), chart.across.begin + 30), y - 16, "chosen", "bold chosen", "middle")


def _draw_legend(chart: Chart, *, has_larger: bool) -> None:
    entries = [("chosen", "least memory for the throughput"), ("searched", "other placements")]
    entries += [("searched-line", "do not fit")] if has_larger else []
    x, y = chart.across.begin - 68, chart.up.end - 40
    for style, words in entries:
        chart.drawing.dot(x + 5, y + 4, 4, style)
        chart.drawing.text(x + 16, y + 8, words, "quiet")
        x += 16 + 6.6 * len(words) + 24
