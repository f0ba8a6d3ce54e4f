"""What the steps have given: a line of JSON for each, one page of text, a page with a verdict on each figure, and an archive of
the logs and timelines."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from on_a_gpu.page import published
from on_a_gpu.steps import Step

FINISHED = ("passed", "FAILED", "timed out")
LOG_BYTES = 1 << 20  # kept of each log in the archive: its end


@dataclass(frozen=True)
class Result:
    step: str
    result: str  # one of FINISHED; or "no GPU", "skipped" or "cut", which are tried again
    seconds: float = 0
    said: list[str] = field(default_factory=list)  # the lines that tell the most
    log: str = ""
    began: str = ""  # a time in UTC
    commit: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # what it has measured, by name


class Results:
    """The results of this run and of earlier ones in the same folder. `out` receives copies as soon as a step has ended."""

    def __init__(self, work: Path, out: Path):
        self.work, self.out = work, out
        self.logs = work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self._lines = work / "results.jsonl"
        end_last_line(self._lines)
        packed = read(work / "built.jsonl")  # the builds of another machine, see pack_built
        self._latest = {result.step: result for result in [*packed, *read(self._lines)]}

    def of(self, step: str) -> Result | None:
        return self._latest.get(step)

    def is_finished(self, step: Step, steps: Sequence[Step]) -> bool:
        """Tell whether a step has ended by itself, and what it made is still there, or no longer needed by those of `steps`
        that come after it."""
        result = self.of(step.name)
        if result is None or result.result not in FINISHED:
            return False
        is_there = step.product is None or step.product.exists()
        later = [each for each in steps if each.after == step.name]
        return is_there or (bool(later) and all(self.is_finished(each, steps) for each in later))

    def add(self, result: Result, steps: Sequence[Step]) -> None:
        """Write the result so that a cut after this call cannot lose it."""
        self._latest[result.step] = result
        with self._lines.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.publish(steps)

    def figures(self) -> dict[str, Any]:
        """Return what the last run of each step has measured."""
        found: dict[str, Any] = {}
        for result in self._latest.values():
            found |= result.figures
        return found

    def publish(self, steps: Sequence[Step]) -> None:
        replace(self.work / "summary.txt", page(steps, self._latest))
        replace(self.work / "figures.json", json.dumps(self.figures()))
        outcomes = {name: result.result for name, result in self._latest.items()}
        commits = sorted({result.commit for result in self._latest.values() if result.commit})
        dates = sorted({result.began[:10] for result in self._latest.values() if result.began})
        replace(self.work / "page.md", published(self.figures(), outcomes, commits, dates))
        if self.out.resolve() == self.work.resolve():
            return
        for name in ("summary.txt", "page.md", "results.jsonl"):
            if (self.work / name).exists():
                shutil.copyfile(self.work / name, self.out / name)
        self._archive_logs(self.out / "logs.tar.gz")

    def _archive_logs(self, to: Path) -> None:
        unfinished = to.with_name(to.name + ".part")
        with tarfile.open(unfinished, "w:gz", compresslevel=3) as archive:
            for log in sorted(self.logs.iterdir()):
                add_end_of(log, archive)
            for timeline in sorted(self.work.glob("trainings/timeline-*.json")):
                archive.add(timeline, f"timelines/{timeline.name}")
        unfinished.replace(to)


def read(lines: Path) -> list[Result]:
    """Read results. A line that a cut has left unfinished is ignored."""
    results = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return results


def end_last_line(lines: Path) -> None:
    """Let the next line begin on its own, if a cut has left the last one unfinished."""
    if lines.exists() and not lines.read_text().endswith("\n"):
        with lines.open("a") as file:
            file.write("\n")


def replace(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def add_end_of(log: Path, archive: tarfile.TarFile) -> None:
    size = min(log.stat().st_size, LOG_BYTES)  # a running step may still write to its log
    member = tarfile.TarInfo(f"logs/{log.name}")
    member.size = size
    with log.open("rb") as file:
        file.seek(-size, os.SEEK_END)
        archive.addfile(member, file)


def page(steps: Sequence[Step], latest: dict[str, Result]) -> str:
    """Return one page of text: each step with its result, its seconds and its most important lines."""
    lines = ["Ballast on a GPU", ""]
    results = [latest[step.name] for step in steps if step.name in latest]
    lines += [f"commit {commit}" for commit in sorted({result.commit for result in results if result.commit})]
    lines += [f"steps: {counted(steps, results)}", ""]
    for step in steps:
        result = latest.get(step.name)
        if result is None:
            lines.append(f"{'-':<10} {'':>7}  {step.name:<22} {step.about}")
            continue
        lines.append(f"{result.result:<10} {result.seconds:5.0f} s  {step.name:<22} {step.about}")
        lines += [f"{'':<12}{line}" for line in result.said]
    return "\n".join(lines) + "\n"


def counted(steps: Sequence[Step], results: Sequence[Result]) -> str:
    names = [result.result for result in results]
    counts = [f"{names.count(name)} {name}" for name in dict.fromkeys(sorted(names))]
    left = len(steps) - len(results)
    return ", ".join(counts + ([f"{left} not yet run"] if left else []))
