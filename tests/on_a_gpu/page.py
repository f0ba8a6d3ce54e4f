"""Writes the page of a run: measurements, forecasts and a verdict on each claim. The page can be published as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from on_a_gpu.cases import CASES
from on_a_gpu.judge import FAILS, GIB, HOLDS, MISSING, Verdict, judged

FOOTNOTE = """Forecasts are those of `ballast.plan()`: before the day, from data sheets and 120 GB/s of DRAM; and here, with the
rates and the efficiency that the same run has measured. The error is that of the second, or else of the first."""


def published(figures: Mapping[str, Any], outcomes: Mapping[str, str], commits: Sequence[str], dates: Sequence[str]) -> str:
    """Return the page in Markdown."""
    verdicts = judged(figures, outcomes)
    every = [each for some in verdicts.values() for each in some]
    counts = {result: sum(each.result == result for each in every) for result in (HOLDS, FAILS, MISSING)}
    (headline,) = verdicts["The largest model"]
    lines = [title(figures), "", *machine(figures, commits, dates), ""]
    lines += [f"**{headline.what}**: {headline.result}. {headline.found}".removesuffix(" -"), ""]
    lines += [f"Of {len(every)} claims {counts[HOLDS]} hold, {counts[FAILS]} fail, {counts[MISSING]} were not measured.", ""]
    if failed := [f"- {each.what}: {each.found}; needed: {each.needed}" for each in every if each.result == FAILS]:
        lines += ["Claims that fail:", "", *failed, ""]
    lines += ["## Trainings", "", *trainings(figures), "", FOOTNOTE, ""]
    for heading, some in verdicts.items():
        lines += [f"## {heading}", "", *table(some), ""]
    return "\n".join(lines)


def title(figures: Mapping[str, Any]) -> str:
    """Return the title. Small models on another device only try the commands."""
    is_rehearsal = any(figures.get(name, {}).get("device", "cuda") != "cuda" for name in CASES)
    return "# A rehearsal without a GPU: these figures mean nothing" if is_rehearsal else "# Ballast on one GPU"


def machine(figures: Mapping[str, Any], commits: Sequence[str], dates: Sequence[str]) -> Iterator[str]:
    known = figures.get("machine", {})
    host = figures.get("host", {})
    yield f"- commit {', '.join(commits) or 'unknown'}, {', '.join(dates) or 'no date'}"
    for name, words in {"nvidia-smi": "GPU", "torch": "torch", "system": "system"}.items():
        yield f"- {words}: {known.get(name, 'unknown')}"
    grown = f", {host['grown_bytes'] / GIB:.0f} GiB of memory used at once, {host['stream']:.0f} GB/s" if host else ""
    yield f"- host: {known.get('cores', '?')} cores{grown}"


def trainings(figures: Mapping[str, Any]) -> Iterator[str]:
    yield "| training | tokens/s | step | forecast | here | error | loss | GPU | host | waited |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, case in CASES.items():
        found = figures.get(name, {})
        yield f"| {name}: {case.about} | {' | '.join(row(found, case.tokens))} |"


def row(found: Mapping[str, Any], tokens: int) -> list[str]:
    """Return the cells of a training. What was not measured is a dash; a forecast is there even if the training was cut."""
    seconds, losses = found.get("seconds"), found.get("losses")
    before, here = found.get("forecast_seconds"), found.get("forecast_here_seconds")
    forecast = here or before
    host = found.get("memory_bytes/host")
    waited = found.get("exposed_seconds")
    return [
        f"{tokens / seconds:,.0f}" if seconds else "-",
        f"{seconds:.3f} s" if seconds else "-",
        f"{before:.3f} s" if before else "-",
        f"{here:.3f} s" if here else "-",
        f"{100 * (seconds / forecast - 1):+.0f} %" if seconds and forecast else "-",
        f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "-",
        f"{found['used_bytes'] / GIB:.1f} GiB" if found.get("used_bytes") else "-",
        f"{host / GIB:.1f} GiB" if host else "-",
        f"{100 * waited / found['step_seconds']:.0f} %" if waited is not None and found.get("step_seconds") else "-",
    ]


def table(some: Sequence[Verdict]) -> Iterator[str]:
    yield "| claim | found | needed | |"
    yield "|---|---|---|---|"
    for each in some:
        words = f"**{each.result}**" if each.result == FAILS else each.result
        yield f"| {each.what} | {each.found} | {each.needed} | {words} |"
