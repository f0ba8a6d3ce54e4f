"""The source tree that rules read, and the register of the rules."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from structure import house


class Violation(NamedTuple):
    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


class Tree:
    """The text files below a root by their relative paths, and the names at the top."""

    def __init__(self, root: Path):
        self.top = sorted(set(os.listdir(root)) - house.IGNORED)
        self.files: dict[str, str] = {}
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - house.IGNORED)
            for name in sorted(set(names) - house.IGNORED):
                path = Path(folder, name)
                if path.suffix in house.TEXT_SUFFIXES and not path.is_symlink():
                    self.files[path.relative_to(root).as_posix()] = path.read_text(errors="replace")

    def with_suffix(self, suffixes: set[str]) -> Iterator[tuple[str, str]]:
        return ((path, text) for path, text in self.files.items() if Path(path).suffix in suffixes)

    def code(self) -> Iterator[tuple[str, str]]:
        return self.with_suffix(house.CODE_SUFFIXES)

    def cmake(self) -> Iterator[tuple[str, str]]:
        for path, text in self.files.items():
            if path.endswith("CMakeLists.txt") or path.endswith(".cmake"):
                yield path, re.sub(r"#[^\n]*", "", text)


Rule = Callable[[Tree], Iterator[Violation]]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable:
    def register(find: Callable[[Tree], Iterator[tuple[str, int, str]]]) -> Callable:
        RULES[name] = lambda tree: (Violation(file, line, name, message) for file, line, message in find(tree))
        return find

    return register
