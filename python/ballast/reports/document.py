"""The HTML document of a report. It needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ballast.reports.svg import DARK, FONT, escaped, style, variables

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
