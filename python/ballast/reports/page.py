"""Write the HTML page of a plan. It needs no other file."""

from __future__ import annotations

from collections.abc import Sequence

from ballast import _core
from ballast.reports.front import draw_front
from ballast.reports.ledger import draw_memory
from ballast.reports.svg import DARK, FONT, escaped, style, variables
from ballast.reports.timeline import draw_timeline
from ballast.result import Plan, differences
from ballast.sizes import human_amount, human_count, human_size, human_time

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
ABOUT_STEP = "Rank 0 of the simulated step. Steps overlap: updates may run during the next step. Point at a box for details."


def page(searched: Sequence[Plan], front: Sequence[Plan], chosen: Plan) -> str:
    """Return the page of the chosen plan; `draw_front()` explains the others."""
    title = escaped(f"{chosen.model} on {chosen.ranks} x {chosen.gpu.upper()}")
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
    head = f'<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width"/>\n<title>{title}</title>'
    body = "\n".join([f"<h1>{title}</h1>", f"<p>{escaped(chosen.where())}; {escaped(chosen.formats())}</p>", *sections])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
{head}
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


def _figures(plan: Plan) -> str:
    figures = {
        "step": human_time(plan.seconds),
        "tokens/s, all ranks": f"{plan.tokens_per_second:,.0f}",
        "memory of a GPU": f"{human_size(plan.bytes_in('device'))} of {human_size(plan.budget['device'])}",
    }
    if plan.cost_per_million_tokens is not None:
        figures["cost per million tokens"] = human_amount(plan.cost_per_million_tokens)
    if plan.train_tokens is not None and plan.training_seconds is not None:
        figures[f"training of {human_count(plan.train_tokens)} tokens"] = human_time(plan.training_seconds)
    if plan.training_cost is not None:
        figures["cost of the training"] = human_amount(plan.training_cost)
    entries = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in figures.items())
    return f"<dl>{''.join(entries)}</dl>"


def _table(front: Sequence[Plan], chosen: Plan) -> str:
    heads = ["GPU", "host", "drives", "step", "tokens/s"]
    heads += ["cost per million tokens"] if chosen.price is not None else []
    lines = ["".join(f"<th>{head}</th>" for head in [*heads, "placement"])]
    for plan, how in zip(front, differences(front), strict=True):
        sizes = [human_size(plan.bytes_in(tier)) if plan.bytes_in(tier) else "-" for tier in plan.memory]
        cost = plan.cost_per_million_tokens
        amount = [human_amount(cost)] if cost is not None else []
        cells = [*sizes, human_time(plan.seconds), f"{plan.tokens_per_second:,.0f}", *amount, how]
        lines.append("".join(f"<td>{escaped(cell)}</td>" for cell in cells))
    marks = ["", *(' class="chosen"' if plan is chosen else "" for plan in front)]
    rows = "\n".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, lines, strict=True))
    return f'<div class="wide"><table>\n{rows}\n</table></div>'
