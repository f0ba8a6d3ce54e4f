"""run_page.py [--renew] PAGE: run the blocks of a page in order. Exit with 1 at the first that does not do what it shows."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")) / "python"
sys.path[:0] = [str(PACKAGE), str(Path(__file__).parent), str(ROOT / "tests")]

from blocks import Block, blocks_of  # noqa: E402
from python.wrap.support.programs import run_program  # noqa: E402

SHOWN_ONLY = {"", "text", "mermaid"}
COMPILED = {"cpp", "cmake"}  # tests/package compiles the C++ code of the pages
SECONDS = 120  # limit of a command
FORKED = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}  # the values are what follows `python`
COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Failed(Exception):
    """A block did not do what the page says."""


@dataclass
class Output:
    """What a block printed, and the page's lines for it, counted from 1, up to and without `end`."""

    begin: int
    end: int
    indent: int
    printed: str


@dataclass
class Run:
    """Runs the blocks of a page in the current directory."""

    renews: bool
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""  # the output of the last block
    outputs: list[Output] = field(default_factory=list)

    def block(self, block: Block) -> None:
        if block.not_run:
            return
        if block.title == "Output":
            end = block.line + len(block.lines)
            self.compare(block.place, block.lines, Output(block.line, end, block.indent, self.printed))
        elif block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            self.printed = self.python(block)
        elif block.language in ("console", "bash"):
            self.printed = ""
            for line, command, shown in commands_of(block):
                self.printed += self.command(block, line, command, shown)
        elif block.language not in SHOWN_ONLY | COMPILED:
            raise Failed(f'{block.place}: nothing runs {block.language!r} blocks: mark it "<!-- not run: REASON -->"')

    def python(self, block: Block) -> str:
        text = "\n" * (block.line - 1) + block.text  # errors then name the page's line
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, str(block.page), "exec"), self.names)
        return printed.getvalue()

    def command(self, block: Block, line: int, command: str, shown: tuple[str, ...]) -> str:
        ended = run_command(command)
        place = f"{block.page}:{line}"
        printed = ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
        if ended.returncode != 0 and not shown:
            raise Failed(f"{place}: {command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        if shown:
            self.compare(place, shown, Output(line + 1, line + 1 + len(shown), block.indent, printed))
        return printed

    def compare(self, place: str, shown: tuple[str, ...], output: Output) -> None:
        expected = "".join(f"{line}\n" for line in shown)
        if self.renews and "..." not in expected:
            self.outputs.append(output)
        elif not doctest.OutputChecker().check_output(expected, output.printed, COMPARED):
            raise Failed(f"{place}: the page shows\n{expected}\nbut this is printed:\n{output.printed}")


def commands_of(block: Block) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield the line of each command, the command, and the output below it. A backslash at the end of a line joins lines."""
    lines = list(enumerate(block.lines, block.line))
    while lines:
        number, text = lines.pop(0)
        if block.language == "console" and not text.startswith("$ "):
            raise Failed(f"{block.page}:{number}: a console block begins with a command, after `$ `")
        command = text.removeprefix("$ ") if block.language == "console" else text
        while command.endswith("\\"):
            number, text = lines.pop(0)
            command = command[:-1] + text.strip()
        shown = []
        while block.language == "console" and lines and not lines[0][1].startswith("$ "):
            shown.append(lines.pop(0)[1])
        if command.strip() and not command.startswith("#"):
            yield number, command, tuple(shown)


def run_command(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a page. A program that imports torch is a fork, if nothing but its arguments is in the command."""
    words = shlex.split(command)
    if words[0] in FORKED and not set(command) & set("|&;<>$`*\n"):
        return run_program([*FORKED[words[0]], *words[1:]], environment(), timeout=SECONDS)
    return subprocess.run(
        ["bash", "-c", with_programs(command)], env=environment(), capture_output=True, text=True, timeout=SECONDS
    )


def with_programs(command: str) -> str:
    """Define the commands of the pages as those of this build and this Python."""
    python = shlex.quote(sys.executable)
    return f"""
ballast() {{ {python} -m ballast "$@"; }}
torchrun() {{ {python} -m torch.distributed.run --standalone "$@"; }}
python() {{ {python} "$@"; }}
{command}"""


def environment() -> dict[str, str]:
    """Return the environment of a command: it has the built package, and torchrun prints no advice."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def renew(page: Path, outputs: list[Output]) -> None:
    """Update the outputs in the page, from the last to the first, so that line numbers stay right."""
    lines = page.read_text().splitlines()
    for output in reversed(outputs):
        printed = [(" " * output.indent + line).rstrip() for line in output.printed.rstrip().splitlines()]
        lines[output.begin - 1 : output.end - 1] = printed
    page.write_text("\n".join(lines) + "\n")


def run_page(page: Path, *, renews: bool = False) -> None:
    """Run the blocks of a page in an empty directory, which is removed afterwards."""
    run = Run(renews)
    folder, before = tempfile.mkdtemp(prefix="ballast-docs-"), os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, "")  # files that the page writes can be imported
    try:
        for block in blocks_of(page):
            run.block(block)
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    if renews:
        renew(page, run.outputs)


def main(arguments: list[str]) -> int:
    renews = "--renew" in arguments
    (page,) = (Path(word).resolve() for word in arguments if word != "--renew")
    try:
        run_page(page, renews=renews)
    except Failed as failure:
        print(failure, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    else:
        return 0
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
