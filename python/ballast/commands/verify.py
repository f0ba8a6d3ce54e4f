"""`ballast verify`: check all bytes of a checkpoint."""

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


def add_to(commands: Any) -> None:
    """Add this command to the command line."""
    about = "Read all of a checkpoint, and list every piece that differs from its checksum. Exits with 1 if there is any."
    parser = commands.add_parser("verify", help="check all bytes of a checkpoint", description=about, epilog=EXAMPLE)
    parser.add_argument("directory", help="the directory of ballast.save()")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print a line for each problem."""
    problems = problems_of(chosen.directory)
    if chosen.json:
        print(json.dumps({"problems": problems}, indent=2))
    else:
        print("\n".join(problems) or f"{chosen.directory} is intact: every byte has its checksum")
    return 1 if problems else 0
