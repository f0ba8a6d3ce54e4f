"""`ballast verify`: is a checkpoint what was written?"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ballast.checkpoint.verifying import problems_of

EXAMPLE = """\
examples:
  ballast verify checkpoints
  ballast verify checkpoints --json
"""


def add_to(verbs: Any) -> None:
    """Makes this a verb of the command line."""
    about = "Reads all of a checkpoint, and names what is not as it was written. Ends with 1 where there is such a thing."
    verb = verbs.add_parser("verify", help="is a checkpoint whole?", description=about, epilog=EXAMPLE)
    verb.add_argument("directory", help="that ballast.save() was given")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """A line for each thing."""
    problems = problems_of(asked.directory)
    if asked.json:
        print(json.dumps({"problems": problems}, indent=2))
    else:
        print("\n".join(problems) or f"{asked.directory} is what was written")
    return 1 if problems else 0
