"""`ballast doctor`: what on this machine stands in the way?"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ballast.doctor import examine
from ballast.finding import Finding

EXAMPLE = """\
examples:
  ballast doctor
  ballast doctor --drive . --json
"""
MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def add_to(verbs: Any) -> None:
    """Makes this a verb of the command line."""
    about = "Looks at this machine, and says what to change. Ends with 1 where something would stop a training."
    verb = verbs.add_parser("doctor", help="what is wrong with this machine?", description=about, epilog=EXAMPLE)
    verb.add_argument("--drive", action="append", metavar="FOLDER", help="to be measured for state, for some seconds")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """All findings."""
    findings = examine(drives=asked.drive or ["."])
    if asked.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_line(finding) for finding in findings))
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def _line(finding: Finding) -> str:
    line = f"{MARKS[finding.state]}  {finding.about:<10}{finding.found}"
    return line + (f"\n{'':16}{finding.remedy}" if finding.remedy else "")
