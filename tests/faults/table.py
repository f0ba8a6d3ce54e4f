"""The table of the fault matrix in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from faults.matrix import FAULTS, PHASES, REASONS, TRANSPORTS, Cell, impossible

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "failures.md"
BEGIN, END = "<!-- the fault matrix: written by tests/faults/run --write -->", "<!-- end of the fault matrix -->"


def tables(words_of: dict[Cell, str]) -> str:
    text = ""
    for transport, title in TRANSPORTS.items():
        text += f"\n### {title[0].upper()}{title[1:]}\n\n| | {' | '.join(PHASES)} |\n|{'---|' * (len(PHASES) + 1)}\n"
        for fault in FAULTS:
            row = [Cell(fault, phase, transport) for phase in PHASES]
            words = [f"({impossible(cell)})" if impossible(cell) else words_of.get(cell, "not run") for cell in row]
            text += f"| {fault} | {' | '.join(words)} |\n"
    text += "\nImpossible cells:\n\n" + "".join(f"- ({letter}) {reason}.\n" for letter, reason in REASONS.items())
    return text


def renewed(page: str, words_of: dict[Cell, str]) -> str:
    """Return the page with the outcomes of these cells, in words. Other cells stay as they are."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(written(page) | words_of)}\n{END}{after}"


def written(page: str) -> dict[Cell, str]:
    """Return the cells of a page, with their words."""
    found: dict[Cell, str] = {}
    titles = {title.lower(): transport for transport, title in TRANSPORTS.items()}
    transport = ""
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("### "):
            transport = titles[line.removeprefix("### ").lower()]
        words = [each.strip() for each in line.strip("|").split("|")]
        if transport and words[0] in FAULTS:
            found |= {Cell(words[0], phase, transport): each for phase, each in zip(PHASES, words[1:], strict=True)}
    return found


def is_outcome(words: str) -> bool:
    return re.fullmatch(r"continues|continues or ends|all end|only that rank ends|B\d{4}(/B\d{4})*", words) is not None
