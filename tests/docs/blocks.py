"""Reads the fenced blocks of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"
FENCE = re.compile(r"^( *)(```+|~~~+) *([\w+-]*) *(.*)$")
NOT_RUN = re.compile(r" *<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A block of a page. `line` is the number of its first line of text, counted from 1."""

    page: Path
    line: int
    language: str
    title: str
    lines: tuple[str, ...]
    indent: int
    not_run: str  # the reason, or empty

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in its order."""
    return list(_blocks(page, page.read_text().splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if not opening:
            number += 1
            continue
        begin = number + 1
        end = begin
        while end < len(lines) and lines[end].strip() != opening[2]:
            end += 1
        if end == len(lines):
            raise ValueError(f"{page}:{begin}: a block has no end")
        indent = len(opening[1])
        title = re.search(r'title="([^"]*)"', opening[4])
        yield Block(
            page=page,
            line=begin + 1,
            language=opening[3],
            title=title[1] if title else "",
            lines=tuple(line[indent:] for line in lines[begin:end]),
            indent=indent,
            not_run=_why_not(lines[:number]),
        )
        number = end + 1


def _why_not(before: list[str]) -> str:
    """Return the reason in the last line before the block that is not empty."""
    last = next((line for line in reversed(before) if line.strip()), "")
    found = NOT_RUN.fullmatch(last)
    return found[1] if found else ""


def pages() -> list[Path]:
    """Return every page of the site."""
    return sorted(PAGES.rglob("*.md"))
