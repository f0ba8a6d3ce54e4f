"""Write the HTML page of a plan. It needs no other file."""

from __future__ import annotations

from collections.abc import Sequence

from ballast import _core
from ballast.reports.document import document, figures_list, table
from ballast.reports.front import draw_front
from ballast.reports.ledger import draw_memory
from ballast.reports.svg import escaped
from ballast.reports.timeline import draw_timeline
from ballast.result import Plan, differences
from ballast.sizes import human_amount, human_count, human_size, human_time

ABOUT_STEP = "Rank 0 of the simulated step. Steps overlap: updates may run during the next step. Point at a box for details."


def page(searched: Sequence[Plan], front: Sequence[Plan], chosen: Plan) -> str:
    """Return the page of the chosen plan; `draw_front()` explains the others."""
    title = f"{chosen.model} on {chosen.ranks} x {chosen.gpu.upper()}"
    sections = [
        _figures(chosen),
        "<h2>Memory and throughput</h2>",
        draw_front(searched, front, chosen, titled=False).svg(alone=False),
        _table(front, chosen),
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


def _table(front: Sequence[Plan], chosen: Plan) -> str:
    heads = [chosen.rank_device, "host", "drives", "step", "tokens/s"]
    heads += ["cost per million tokens"] if chosen.price is not None else []
    lines = []
    for plan, how in zip(front, differences(front), strict=True):
        sizes = [human_size(plan.bytes_in(tier)) if plan.bytes_in(tier) else "-" for tier in plan.memory]
        cost = plan.cost_per_million_tokens
        amount = [human_amount(cost)] if cost is not None else []
        lines.append([*sizes, human_time(plan.seconds), f"{plan.tokens_per_second:,.0f}", *amount, how])
    number = next(number for number, plan in enumerate(front) if plan is chosen)
    return table([*heads, "placement"], lines, chosen=number)
