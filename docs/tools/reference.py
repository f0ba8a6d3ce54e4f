"""Reference pages, made from the code: options from their schema, the command line from its parsers, error codes from
their table. The built package has to be on the path."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def options_of(name: str) -> str:
    """Return the table of options of `wrap`, `plan`, or of a class such as `Tuning`."""
    import ballast
    from ballast.options import Options
    from ballast.schema import options_of, signature_of
    from ballast.wrap_options import WrapOptions

    kind = {"wrap": WrapOptions, "plan": Options}.get(name) or getattr(ballast, name)
    lines = ["| keyword | type | default | meaning |", "|---|---|---|---|"]
    for each in signature_of(kind):
        meaning = _cell(options_of(kind)[each.name].meaning)
        lines.append(f"| `{each.name}` | {_code(each.annotation)} | {_code(repr(each.default))} | {meaning} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""  # a "|" in code does not end a table's cell


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def command_line() -> str:
    """Return a section for each command of `ballast`, with its help and a table of its options."""
    from ballast.tools.command_line import COMMANDS, Parser

    commands = Parser(prog="ballast").add_subparsers(metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        module.add_to(commands)
    return "\n\n".join(_command(name, parser) for name, parser in commands.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [_argument(action) for action in parser._actions if action.dest != "help"]
    examples = textwrap.dedent((parser.epilog or "").partition("\n")[2]).strip()
    parts = [f"## `ballast {name}`", parser.description or "", "| argument | meaning |\n|---|---|\n" + "\n".join(rows)]
    return "\n\n".join([*parts, f"```bash\n{examples}\n```"])


def _argument(action: argparse.Action) -> str:
    shown = " ".join([*(action.option_strings[-1:] or [str(action.metavar or action.dest)])])
    value = f" {action.metavar}" if action.option_strings and action.metavar else ""
    return f"| `{shown}{value}` | {_cell((action.help or '').replace('%%', '%'))} |"


def error_codes() -> str:
    """Return the table of error codes without its title: a test keeps ERRORS.md equal to the code."""
    text = (ROOT / "kernels" / "runtime" / "ERRORS.md").read_text()
    rows = []
    for line in text[text.index("| code") :].splitlines():
        rows.append(re.sub(r"^\| (B\d{4}) ", r'| <span id="\1"></span>\1 ', line))
    return "\n".join(rows)


def file_of_repository(path: str) -> str:
    """Return a file from outside of docs/. Its links lead to pages where there is one, else they name the file.

    >>> _for_site("see [one](docs/decisions.md#top), [two](tests/README.md) and [three](https://x.org)")
    'see [one](decisions.md#top), two (`tests/README.md`) and [three](https://x.org)'
    """
    return _for_site((ROOT / path).read_text())


def _for_site(text: str) -> str:
    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        if target.startswith(("http://", "https://", "#")):
            return found[0]
        return f"[{words}]({target.removeprefix('docs/')})" if target.startswith("docs/") else f"{words} (`{target}`)"

    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", link, text)


GENERATORS: dict[str, Callable[..., str]] = {
    "options": options_of,
    "command-line": command_line,
    "error-codes": error_codes,
    "file": file_of_repository,
}
