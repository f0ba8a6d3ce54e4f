"""The command line, `ballast VERB`. It ends with 0 where all is well, 1 for a no, 2 where it was used wrongly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ballast import _core
from ballast.commands import doctor, inspect, plan, verify
from ballast.commands.parser import Parser
from ballast.errors import Error, UsageError

VERBS = (plan, doctor, inspect, verify)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    >>> main(["plan", "gpt2", "--ranks", "0"])
    2
    """
    parser = Parser(prog="ballast", description="Trains models far larger than GPU memory.")
    parser.add_argument("--version", action="version", version=f"ballast {_core.version}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    for verb in VERBS:
        verb.add_to(verbs)
    asked = parser.parse_args(arguments)
    try:
        code: int = asked.run(asked)
        sys.stdout.flush()
    except Error as error:
        return _report(error, as_json=asked.json)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _report(error: Error, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": _parts(error)}, indent=2))
    else:
        print(error, file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def _parts(error: Error) -> dict[str, Any]:
    names = ("code", "what_happened", "where", "needed", "available", "remedy")
    return {name: getattr(error, name) for name in names}
