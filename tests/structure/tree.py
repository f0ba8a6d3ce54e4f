"""The source tree that rules read, and the register of the rules."""

import os
import re
import subprocess
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


def paths_of_git(root: Path) -> list[Path] | None:
    """Return what git tracks or would add, relative to the root, or None if the root is no work tree that git reads."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or refuses a tree of another user
        return None
    # A deleted file stays listed until its deletion is added. A nested repository is listed as one folder.
    paths = [Path(os.fsdecode(name)) for name in sorted(set(listed.stdout.split(b"\0"))) if name]
    return [path for path in paths if os.path.lexists(root / path) and not set(path.parts) & house.IGNORED]


def paths_below(root: Path) -> tuple[list[str], list[Path]]:
    """Return the names at the top of the root, and its files relative to it."""
    listed = paths_of_git(root)
    if listed is not None:
        return sorted({path.parts[0] for path in listed}), [path for path in listed if (root / path).is_file()]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - house.IGNORED)
        files += [Path(folder, name).relative_to(root) for name in sorted(set(names) - house.IGNORED)]
    return sorted(set(os.listdir(root)) - house.IGNORED), files


class Tree:
    """The text files below a root by their relative paths, and the names at the top.

    In a git work tree these are what git tracks or would add, so that what .gitignore names, such as a `venv`, is not judged.
    """

    def __init__(self, root: Path):
        self.top, paths = paths_below(root)
        self.files: dict[str, str] = {}
        for path in paths:
            if path.suffix in house.TEXT_SUFFIXES and not (root / path).is_symlink():
                self.files[path.as_posix()] = (root / path).read_text(errors="replace")

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
