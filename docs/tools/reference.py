"""Reference pages, made from the code: options from signatures, the command line from its parsers, error codes from
their table. The built package has to be on the path."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Option:
    """A keyword of a function, as a reader needs it."""

    name: str
    kind: str
    default: str
    text: str


def options_of(name: str) -> str:
    """Return the table of a function's keywords, such as those of `wrap` or `plan`."""
    import ballast

    return _table(getattr(ballast, name))


def _table(function: Callable[..., Any]) -> str:
    options = list(_options(function))
    heads = ["keyword", "type", "default", "meaning"]
    rows = [[f"`{each.name}`", _code(each.kind), _code(each.default), _cell(each.text)] for each in options]
    if not any(each.default for each in options):  # the meaning names them instead
        heads, rows = [head for head in heads if head != "default"], [[*row[:2], row[3]] for row in rows]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _options(function: Callable[..., Any]) -> Iterator[Option]:
    texts = _texts_in_docstring(inspect.getdoc(function) or "")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = "" if parameter.default is parameter.empty else repr(parameter.default)
            yield Option(parameter.name, _type(parameter.annotation), default, texts.get(parameter.name, ""))


COLUMNS = re.compile(r"(\w+) {2,}(\S.*)|(\w+)")  # a long name stands alone in its line
ENTRY = re.compile(r" *(?:[-*] )?`{0,2}(\w+)`{0,2}(?: \([^)]*\))?: ?(.*)")


def _texts_in_docstring(docstring: str) -> dict[str, str]:
    """Read `name    text` in columns, and `name: text` in a list or below `Args:`; deeper lines continue a text.

    >>> _texts_in_docstring("First.\\n\\nstage     a number\\n          or auto\\n\\nArgs:\\n    tile: of one\\n        update")
    {'stage': 'a number or auto', 'tile': 'of one update'}
    >>> _texts_in_docstring("- `run`: a name\\n  of a run\\n- `tile`:\\n  elements")
    {'run': 'a name of a run', 'tile': 'elements'}
    """
    found: dict[str, str] = {}
    name, indent = "", 0
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        name_and_text = _entry(line, depth)
        if name_and_text and not (name and depth > indent):
            name, found[name_and_text[0]], indent = name_and_text[0], name_and_text[1], depth
        elif name and depth > indent:
            found[name] = f"{found[name]} {line.strip()}".strip()
        else:
            name = ""
    return {name: text for name, text in found.items() if text}


def _entry(line: str, depth: int) -> tuple[str, str] | None:
    if depth == 0 and (columns := COLUMNS.fullmatch(line)):
        return columns[1] or columns[3], columns[2] or ""
    entry = ENTRY.fullmatch(line) if depth in (2, 4) or line[:2] in ("- ", "* ") else None
    return (entry[1], entry[2]) if entry else None


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = getattr(annotation, "__forward_arg__", annotation)
    text = text if isinstance(text, str) else getattr(text, "__name__", str(text))
    return text.replace("typing.", "")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""  # a "|" in code does not end a table's cell


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def command_line() -> str:
    """Return a section for each command of `ballast`, with its help and a table of its options."""
    from ballast.tools.command_line import COMMANDS, Parser

    commands = Parser(prog="ballast").add_subparsers(metavar="COMMAND", parser_class=Parser)
    for add_to in COMMANDS:
        add_to(commands)
    return "\n\n".join(_command(name, parser) for name, parser in commands.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [_argument(action) for action in parser._actions if action.dest != "help"]
    examples = textwrap.dedent((parser.epilog or "").partition("\n")[2]).strip()
    parts = [f"## `ballast {name}`", parser.description or "", "| argument | meaning |\n|---|---|\n" + "\n".join(rows)]
    return "\n\n".join([*parts, f"```bash\n{examples}\n```"])


def _argument(action: argparse.Action) -> str:
    shown = " ".join([*(action.option_strings[-1:] or [str(action.metavar or action.dest)])])
    value = f" {action.metavar}" if action.option_strings and action.metavar else ""
    return f"| `{shown}{value}` | {_cell(action.help or '')} |"


def error_codes() -> str:
    """Return the table of error codes without its title: a test keeps ERRORS.md equal to the code."""
    text = (ROOT / "kernels" / "runtime" / "ERRORS.md").read_text()
    rows = []
    for line in text[text.index("| code") :].splitlines():
        rows.append(re.sub(r"^\| (B\d{4}) ", r'| <span id="\1"></span>\1 ', line))
    return "\n".join(rows)


def file_of_repository(path: str) -> str:
    """Return a file from outside of docs/. Its links lead to pages where there is one, else they name the file.

    >>> _for_site("see [one](docs/index.md#top), [two](tests/README.md) and [three](https://x.org)")
    'see [one](index.md#top), two (`tests/README.md`) and [three](https://x.org)'
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
