"""`ballast doctor`: examine this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ballast.diagnostic import Diagnostic
from ballast.doctor import examine
from ballast.issue import report

EXAMPLE = """\
examples:
  ballast doctor
  ballast doctor --drive . --json
  ballast doctor --issue
"""
MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    about = "Examine this machine, and name what to change. Exits with 1 if a problem would stop a training."
    parser = commands.add_parser("doctor", help="examine this machine", description=about, epilog=EXAMPLE)
    help = "measure this folder as a place for state; takes some seconds; may be repeated"
    parser.add_argument("--drive", action="append", metavar="FOLDER", help=help)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    help = "print what a report of a bug needs, as Markdown: versions, the machine, variables of the launch; no secrets"
    form.add_argument("--issue", action="store_true", help=help)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print all diagnostics."""
    diagnostics = examine(drives=chosen.drive or ["."])
    if chosen.json:
        print(json.dumps([vars(diagnostic) for diagnostic in diagnostics], indent=2))
    else:
        lines = "\n".join(_line(diagnostic) for diagnostic in diagnostics)
        print(report(lines.splitlines()) if chosen.issue else lines)
    return 1 if any(diagnostic.state == "bad" for diagnostic in diagnostics) else 0


def _line(diagnostic: Diagnostic) -> str:
    line = f"{MARKS[diagnostic.state]}  {diagnostic.about:<10}{diagnostic.found}"
    return line + (f"\n{'':16}{diagnostic.remedy}" if diagnostic.remedy else "")
