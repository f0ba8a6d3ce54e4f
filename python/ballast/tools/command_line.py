"""The command line, `ballast COMMAND`. It exits with 0 for success, 1 for a negative answer, 2 for a usage error."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ballast import _core
from ballast.errors import Error, UsageError
from ballast.tools import bench, checkpoints, doctor, plan, report


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose examples keep their lines."""

    def __init__(self, **given: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **given)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else args
        given = Counter(word.split("=")[0] for word in words)
        for option, action in self._option_string_actions.items():
            if given[option] > 1 and isinstance(action, argparse._StoreAction):
                self._print_message(f"{self.prog}: {option} is given {given[option]} times: the last one counts\n", sys.stderr)
        found, unknown = super().parse_known_args(words, namespace)
        positional = {f"--{action.dest}" for action in self._actions if not action.option_strings}
        for word in unknown:
            if word.split("=")[0] in positional:
                self.error(f"there is no option {word}: the {word.split('=')[0].lstrip('-')} is given without a name")
            near = difflib.get_close_matches(word.split("=")[0], self._option_string_actions, n=1, cutoff=0.5)
            self.error(f"there is no option {word}" + (f'; did you mean "{near[0]}"?' if near else ""))
        return found, unknown


# Each adds its commands, in the order of --help.
COMMANDS = (plan, bench, doctor, report, checkpoints)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    >>> main(["plan", "gpt2", "--ranks", "0"])
    2
    """
    parser = Parser(prog="ballast", description="Train models that are far larger than GPU memory.")
    parser.add_argument("--version", action="version", version=f"ballast {_core.version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        module.add_to(commands)
    chosen = parser.parse_args(arguments)
    code = 0
    try:
        try:
            text, content, code = chosen.run(chosen)
            print(json.dumps(content, indent=2) if chosen.json else text)
        except Error as error:
            code = 2 if isinstance(error, UsageError) else 1
            if chosen.json:
                names = ("code", "what_happened", "where", "needed", "available", "remedy")
                print(json.dumps({"error": {name: getattr(error, name) for name in names}}, indent=2))
            else:
                print(error, file=sys.stderr)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
        print("\nstopped: no process of it runs any more", file=sys.stderr)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
