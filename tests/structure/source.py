"""Reads sources: blanks comments and strings, and finds includes, imports and functions.

It finds functions by matching braces. This is not a C++ parser, but it needs no compiler flags and reads .cu files too.
clang-tidy (.clang-tidy, readability-function-size) checks the same limits with a real parser.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<raw>R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
      | (?P<string>"(?:\\.|[^"\\\n])*")
      | (?<![0-9a-fA-F])(?P<char>'(?:\\.|[^'\\\n])+')""",
    re.DOTALL | re.VERBOSE,
)


def _spaces(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def without_comments_and_strings(text: str) -> str:
    """Return the text with comments and strings blanked, in the same lines and columns. A string keeps its quotes."""
    return _TOKEN.sub(lambda m: _spaces(m[0]) if m["comment"] else m[0][0] + _spaces(m[0][1:-1]) + m[0][-1], text)


class Literal(NamedTuple):
    begin: int
    end: int
    text: str  # the text between the quotes, as it is written


def strings(text: str) -> Iterator[Literal]:
    for found in _TOKEN.finditer(text):
        quoted = found["string"] or found["raw"]
        if quoted:
            opening, closing = ("(", ")") if found["raw"] else ('"', '"')
            inner = quoted[quoted.index(opening) + 1 : quoted.rindex(closing)]
            yield Literal(found.start(), found.end(), inner)


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class Include(NamedTuple):
    line: int
    path: str
    quoted: bool


def includes(text: str) -> Iterator[Include]:
    code = without_comments_and_strings(text)  # includes are found here, but their paths are blanked: those come from `text`
    for found in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">\n]+)[>"]', code, re.MULTILINE):
        yield Include(line_of(text, found.start()), text[slice(*found.span(2))], found[1] == '"')


class Import(NamedTuple):
    line: int
    module: str
    name: str  # imported from the module; empty if the module itself is imported


def python_imports(text: str) -> Iterator[Import]:
    """Yield all imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, each.name, "") for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (Import(node.lineno, module, each.name) for each in node.names)


class Function(NamedTuple):
    line: int
    name: str
    lines: int  # 0 for a declaration
    parameters: int


def functions(path: str, text: str) -> list[Function]:
    return _python_functions(text) if path.endswith(".py") else _cpp_functions(text)


def _python_functions(text: str) -> list[Function]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            lines = node.end_lineno - node.lineno + 1
            found.append(Function(node.lineno, node.name, lines, count))
    return found


_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum)\b|\bextern\s*\"")
_NOISE = re.compile(r"\b(template|requires|noexcept|alignas|decltype|explicit|__\w+__)\s*(?=[(<])|\[\[")
_ACCESS = re.compile(r"(\s*(public|private|protected)\s*:)?\s*")
_MACRO = re.compile(r"[A-Z][A-Z0-9_]{2,}|static_assert")
_BRACKETS = {"(": ")", "<": ">", "[": "]", "{": "}"}


def _cpp_functions(text: str) -> list[Function]:
    code = without_comments_and_strings(text)
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: _spaces(m[0]), code, flags=re.MULTILINE)
    found = []
    start = at = 0  # `start` is that of the current declaration, `at` the position of the reader
    while (stop := re.compile(r"[;{}]").search(code, at)) is not None:
        start += _ACCESS.match(code[start : stop.start()]).end()
        head, at = code[start : stop.start()], stop.end()
        if stop[0] == "{" and not _opens_scope(head):
            at = _closing(code, stop.start()) + 1
            if _is_value(head):
                continue  # the declaration continues
        if stop[0] != "}" and (signature := _signature(head)) is not None:
            line = line_of(code, start)
            lines = line_of(code, at - 1) - line + 1 if stop[0] == "{" else 0
            found.append(Function(line, signature[0], lines, signature[1]))
        start = at
    return found


def _opens_scope(head: str) -> bool:
    """Return whether the brace after `head` opens declarations of a namespace, a class or an extern "C" block."""
    plain = _without_noise(head)
    scope = _SCOPE.search(plain)
    return scope is not None and "(" not in plain[scope.end() :] and "=" not in plain[scope.end() :]


def _is_value(head: str) -> bool:
    """Return whether the brace after `head` begins a value: a default argument, or a member in a constructor's list."""
    listed = re.search(r"\)\s*(?:noexcept\s*)?:(?!:)", head)
    last_word = re.search(r"[\w>]+\s*$", head)
    is_member = listed is not None and last_word is not None and listed.end() <= last_word.start()
    return is_member or head.count("(") > head.count(")")


def _signature(head: str) -> tuple[str, int] | None:
    """Return the name and the number of parameters if `head` declares or defines a function or a named lambda."""
    plain = _without_noise(head)
    call = re.search(r"(operator\s*(?:\(\s*\)|[^\s\w(]+)|~?\w+(?:\s*<[^;()]*>)?|\])\s*\(", plain)
    if call is None:
        return None
    name = "lambda" if call[1] == "]" else re.sub(r"\s", "", call[1])
    before = plain[: call.start()]
    if "=" in before and name != "lambda":
        return None  # a variable whose value is a call
    if _MACRO.fullmatch(name) or re.search(r"\b(return|throw|using|typedef|friend)\b", before):
        return None  # a macro such as TEST_CASE may take any number
    return name, _count_parameters(plain[call.end() : _closing(plain, call.end() - 1)])


def _count_parameters(text: str) -> int:
    depth = 0
    commas = 0
    for index, letter in enumerate(text):
        if letter in "(<[{":
            depth += 1
        elif letter in ")]}" or (letter == ">" and text[index - 1 : index] != "-"):
            depth -= 1
        elif letter == "," and depth == 0:
            commas += 1
    return commas + 1 if text.strip() not in ("", "void") else 0


def _without_noise(head: str) -> str:
    """Blank attributes, template and requires clauses, which have brackets of their own."""
    at = 0
    while (noise := _NOISE.search(head, at)) is not None:
        opening = noise.end() if noise[0] != "[[" else noise.start()
        end = _closing(head, opening) + 1
        head = head[: noise.start()] + _spaces(head[noise.start() : end]) + head[end:]
        at = end
    return head


def _closing(code: str, opening: int) -> int:
    """Return the position of the closing bracket, or the end of the text if there is none."""
    left, right = code[opening], _BRACKETS[code[opening]]
    depth = 0
    for index in range(opening, len(code)):
        if code[index] == left:
            depth += 1
        elif code[index] == right and not (right == ">" and code[index - 1] == "-"):
            depth -= 1
            if depth == 0:
                return index
    return len(code)
