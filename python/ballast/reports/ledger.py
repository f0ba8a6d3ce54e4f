"""Draw the memory of a rank as bars."""

from __future__ import annotations

from ballast.reports.svg import Axis, Drawing
from ballast.result import Plan
from ballast.sizes import human_size

WIDTH, ROW, GAP = 1080, 24, 14
BARS, END = 230, 880  # pixels from the left: names before, sizes after


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
