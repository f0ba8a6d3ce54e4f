"""The command line, `ballast COMMAND`. It exits with 0 for success, 1 for a negative answer, 2 for a usage error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ballast import _core
from ballast.commands import bench, convert, doctor, export, inspect, plan, report, verify
from ballast.commands.parser import Parser
from ballast.errors import Error, UsageError

COMMANDS = (plan, bench, doctor, report, inspect, verify, export, convert)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    >>> main(["plan", "gpt2", "--ranks", "0"])
    2
    """
    parser = Parser(prog="ballast", description="Train models that are far larger than GPU memory.")
    parser.add_argument("--version", action="version", version=f"ballast {_core.version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_to(commands)
    chosen = parser.parse_args(arguments)
    code = 0
    try:
        try:
            code = chosen.run(chosen)
        except Error as error:
            code = 2 if isinstance(error, UsageError) else 1
            _report(error, as_json=chosen.json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _report(error: Error, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": _parts(error)}, indent=2))
    else:
        print(error, file=sys.stderr)


def _parts(error: Error) -> dict[str, Any]:
    names = ("code", "what_happened", "where", "needed", "available", "remedy")
    return {name: getattr(error, name) for name in names}
