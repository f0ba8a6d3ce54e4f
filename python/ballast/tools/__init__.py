"""The commands of `ballast`: planning, measuring, examining, reporting, and commands on checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from textwrap import indent
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a command has found, as text and as an object for --json, and its exit code."""

    text: str
    content: Any
    code: int = 0


Run = Callable[[argparse.Namespace], Answer]


def add_command(commands: Any, run: Run, help: str, about: str, examples: str) -> argparse.ArgumentParser:
    """Add a command with the name of its function, which prints JSON too. `examples` follow the word `ballast`, one a line."""
    shown = "examples:\n" + indent(examples.strip(), "  ballast ")
    parser: argparse.ArgumentParser = commands.add_parser(run.__name__, help=help, description=about, epilog=shown)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser
