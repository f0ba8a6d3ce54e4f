"""Finds the messages of the sources: every string of more than one word, with a placeholder `{}` for each inserted value.

It takes strings everywhere and not only in calls of `require()` or `refuse()`, as many messages are composed of parts that
other functions return.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from structure import source


class Message(NamedTuple):
    line: int
    text: str


def messages(path: str, text: str) -> list[Message]:
    strings = _python_strings(text) if path.endswith(".py") else _cpp_strings(text)
    return [message for message in strings if re.search(r"[^\W\d_][^\s]* +\S", message.text)]


# The codes of which the table has no remedy, as no sentence fits all of their messages.
WITHOUT_REMEDY = ("bad_argument", "wrong_dtype", "wrong_size", "unaligned", "unsupported", "out_of_order")


def without_help(path: str, text: str) -> list[int]:
    """Return the lines of errors that say neither what is needed nor what to change, though no remedy of their code does."""
    return [*(_python_without_help(text) if path.endswith(".py") else _cpp_without_help(text))]


def _python_without_help(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "fail":
            if not isinstance(node.args[0], ast.Constant) or node.args[0].value not in WITHOUT_REMEDY:
                continue
        elif node.func.id not in ("refuse", "refuse_unsupported"):
            continue
        if not {"needed", "remedy", None} & {keyword.arg for keyword in node.keywords}:
            yield node.lineno


def _cpp_without_help(text: str) -> Iterator[int]:
    code = source.without_comments_and_strings(text)
    for found in re.finditer(rf"Code::(?:{'|'.join(WITHOUT_REMEDY)})\b", code):
        problem = code[found.end() : code.find(";", code.find(".what", found.end()))]
        is_made_here = re.match(r"[^;{}]*\{[^;]*\.what\b", problem)
        if is_made_here and not re.search(r"\.(needed|remedy)\b", problem):
            yield source.line_of(code, found.start())


def _cpp_strings(text: str) -> Iterator[Message]:
    """Yield the string literals. Those with only white space and comments between them are one."""
    code = source.without_comments_and_strings(text)
    begin, joined, end = 0, "", 0
    for literal in source.strings(text):
        if code[end : literal.begin].strip():
            yield Message(source.line_of(text, begin), joined)
            begin, joined = literal.begin, ""
        joined += literal.text
        end = literal.end
    yield Message(source.line_of(text, begin), joined)


def _python_strings(text: str) -> Iterator[Message]:
    """Yield the string constants and f-strings, without docstrings."""
    yield from _strings_in(ast.parse(text))


def _strings_in(node: ast.AST) -> Iterator[Message]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Message(node.lineno, node.value)
        return
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield Message(node.lineno, "".join(map(str, parts)))
        inside = (part for part in node.values if isinstance(part, ast.FormattedValue))
    else:
        inside = ast.iter_child_nodes(node)
    for child in inside:
        yield from _strings_in(child)
