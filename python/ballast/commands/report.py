"""`ballast report`: show a training whose steps were recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ballast.reports.output import output_path, write
from ballast.reports.run_log import read_run
from ballast.reports.run_page import run_page, summary

EXAMPLE = """\
examples:
  ballast report runs/first
  ballast report runs/first --html first.html
  ballast report runs/first --json
"""


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    about = "Write a page about a training whose steps a ballast.StepLog has recorded: losses, times, waiting, memory, ranks."
    parser = commands.add_parser("report", help="show a recorded training", description=about, epilog=EXAMPLE)
    parser.add_argument("folder", metavar="RUN", help="the folder of the ballast.StepLog")
    parser.add_argument("--html", metavar="FILE.html", help="the page; default: report.html in that folder")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and write no page without --html")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Write the page, and print its summary."""
    folder = Path(chosen.folder)
    logs = read_run(folder)
    figures = summary(logs)
    if chosen.html is not None or not chosen.json:
        html = output_path("--html", chosen.html or str(folder / "report.html"), ".html")
        write(html, run_page(folder.resolve().name, logs))
    if chosen.json:
        print(json.dumps(figures, indent=2))
    else:
        print("\n".join([*(f"{name:<24}{value}" for name, value in figures.items()), f"{'page':<24}{html}"]))
    return 0
