"""`ballast report`: read what a `ballast.StepLog` has recorded, and show it as a page of curves and tables."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from ballast.checks import fail, is_number, refuse
from ballast.new_files import output_path, write_output
from ballast.sizes import human_size, human_time
from ballast.step_reports import FORMAT
from ballast.tiers import lane_in_words
from ballast.tools import Answer, add_command
from ballast.tools.markup import (
    Axis,
    Chart,
    Drawing,
    document,
    draw_scales,
    escaped,
    figures_list,
    legend_width,
    round_step,
    table,
)

EXAMPLES = "report runs/first\nreport runs/first --html first.html\nreport runs/first --json"

NAME = re.compile(r"rank-(\d+)\.jsonl")
NEEDED = {"step", "seconds", "at"}  # each step has them
MOST = 1e18  # the largest figure of a step
TIERS = ("device", "host", "nvme")
STALL = "stall_seconds/"
MIB = 1 << 20
SEVERAL = "A line is the mean of the ranks, and of neighbouring steps in a long run; the band around it spans all of them."
NOTHING_KEPT = "<h2>Memory of a rank</h2><p>Ballast keeps nothing.</p>"
NOT_TIMED = "The time that the loop waited is not recorded: on a GPU, ballast.Tuning(timeline=True) measures it."
WIDTH, HEIGHT, TOP = 1080, 200, 34
LEFT, RIGHT = 84, WIDTH - 12
MOST_POINTS = 360  # a line has no more: more steps are drawn as means of several
STYLES = ("chosen", "forward", "step", "limit", "searched", "backward", "earlier", "ink", "quiet")

Step = dict[str, Any]


def add_to(commands: Any) -> None:
    about = "Write a page about a training whose steps a ballast.StepLog has recorded: losses, times, waiting, memory, ranks."
    parser = add_command(commands, report, "show a recorded training", about, EXAMPLES)
    parser.add_argument("folder", metavar="RUN", help="the folder of the ballast.StepLog")
    parser.add_argument("--html", metavar="FILE.html", help="the page; default: report.html in the folder, none with --json")


def report(chosen: argparse.Namespace) -> Answer:
    folder = Path(chosen.folder)
    logs = read_run(folder)
    figures = summary(logs)
    lines = [f"{name:<24}{value}" for name, value in figures.items()]
    if chosen.html is not None or not chosen.json:
        html = output_path("--html", chosen.html or str(folder / "report.html"), ".html")
        write_output(html, run_page(folder.resolve().name, logs))
        lines.append(f"{'page':<24}{html}")
    return Answer("\n".join(lines), figures)


# --- The files of a StepLog ---


@dataclass(frozen=True)
class Stretch:
    """The steps that one process made, and what it said about the training."""

    first: int  # step
    about: dict[str, Any]


@dataclass(frozen=True)
class RankLog:
    """The steps of one rank, in their order, and the stretches in which its processes made them."""

    rank: int
    stretches: Sequence[Stretch]
    steps: Sequence[Step]

    @property
    def about(self) -> dict[str, Any]:
        """What the last process said about the training."""
        return self.stretches[-1].about if self.stretches else {}

    def values(self, name: str) -> list[float]:
        return [step[name] for step in self.steps if step.get(name) is not None]


def read_run(folder: Path) -> list[RankLog]:
    """Return the ranks of a run, by number."""
    if not folder.is_dir():
        refuse(f"cannot read {folder}: there is no such directory", needed="the folder of a ballast.StepLog")
    files = {int(found[1]): path for path in folder.iterdir() if (found := NAME.fullmatch(path.name))}
    logs = [_read(rank, files[rank]) for rank in sorted(files)]
    logs = [_without_repeats(log, logs[0].stretches) for log in logs]
    if not any(log.steps for log in logs):
        what = "it has no steps" if files else "there is no file rank-0.jsonl"
        refuse(f"cannot read {folder}: {what}", needed="the folder of a ballast.StepLog that a training calls after step()")
    return [log for log in logs if log.steps]


def _read(rank: int, path: Path) -> RankLog:
    about: dict[str, Any] | None = None  # describes a process whose first step comes next
    stretches: list[Stretch] = []
    steps: list[Step] = []
    for line in _lines(path):
        if "format" in line:
            about, number = line, line["format"]
            if not isinstance(number, int) or not 0 <= number <= FORMAT:
                what = f"cannot read {path}: a newer Ballast has written it"
                fail("newer_format", what, needed=f"format {FORMAT}", available=f"format {number}")
            continue
        if about is not None:  # it resumed: what the earlier process did after the checkpoint is not part of the training
            first, steps = int(line["step"]), [step for step in steps if step["step"] < line["step"]]
            stretches, about = [*(each for each in stretches if each.first < first), Stretch(first, about)], None
        steps.append(line)
    return RankLog(rank, stretches, steps)


def _without_repeats(log: RankLog, run_stretches: Sequence[Stretch]) -> RankLog:
    """Leave out steps of a rank that a stretch of the run without this rank made again."""
    own = {stretch.first for stretch in log.stretches}
    ends = [*(stretch.first for stretch in run_stretches[1:]), math.inf]
    others = [(stretch.first, end) for stretch, end in zip(run_stretches, ends) if own and stretch.first not in own]
    steps = [step for step in log.steps if not any(first <= step["step"] < end for first, end in others)]
    return RankLog(log.rank, log.stretches, steps)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines. A process that was stopped leaves a part of a line, the last one or one before a description."""
    texts = [text for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if text]
    objects = [_object(text) for text in texts]
    for number, line in enumerate(objects):
        if line is not None:
            yield line
        elif number + 1 < len(objects) and "format" not in (objects[number + 1] or {}):
            what = f"cannot read {path}: line {number + 1} is neither a description nor a step"
            refuse(what, needed="a file of a ballast.StepLog")


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if "format" in found and is_number(found.get("rank", 0)):  # a description
        return found
    values = [value for value in found.values() if value is not None]  # the figures of a step, which a page can show
    are_shown = all((isinstance(each, bool) or is_number(each)) and abs(float(each)) <= MOST for each in values)
    return found if are_shown and all(found.get(name) is not None for name in NEEDED) else None


# --- The page ---


def run_page(name: str, logs: Sequence[RankLog]) -> str:
    about = f"; recorded by Ballast {logs[0].about['ballast']}" if "ballast" in logs[0].about else ""
    began = f"<p>first step at {_time(logs[0].steps[0]['at'])}{escaped(about)}</p>"
    parts = [began, figures_list(summary(logs)), f"<p>{SEVERAL}</p>"]
    if lines := _stretch_lines(logs):
        parts += ["<h2>Stretches</h2>", table(STRETCH_HEADS, lines)]
    marks = resumed_at(logs)
    rates = sorted({name for step in logs[0].steps for name in step if name == "lr" or name.startswith("lr/")})
    tiers = [tier for tier in TIERS if any(_bytes_in(log, tier) for log in logs)]
    parts += _section(logs, "Loss", "loss", {"loss": "loss"}, from_zero=False)
    parts += _section(logs, "Gradient norm", "norm before clipping", {"norm": "grad_norm"})
    parts += _section(logs, "Learning rate", "learning rate", {name: name for name in rates})
    times = {"step": "seconds", "of it waited": "exposed_seconds"}
    parts += _section(logs, "Time of a step", "milliseconds", times, scale=1e3)
    parts += _section(logs, "", "tokens/s, all ranks", {"tokens/s": "tokens_per_second"})
    parts += ["<h2>Waiting</h2>", _waits(logs, marks)]
    memory = {tier: f"memory_bytes/{tier}" for tier in tiers}
    parts += _section(logs, "Memory of a rank", "MiB by tier", memory, scale=1 / MIB) or [NOTHING_KEPT]
    parts += ["<h2>Ranks</h2>", table(RANK_HEADS, [_rank_line(log) for log in logs])]
    if owners := logs[0].about.get("memory"):
        parts += [f"<h2>Memory of rank {logs[0].rank} by owner</h2>", f"<pre>{escaped(str(owners))}</pre>"]
    return document(name, parts)


def summary(logs: Sequence[RankLog]) -> dict[str, str]:
    """Return what a reader wants to know first, by name."""
    steps = [step for log in logs for step in log.steps]
    figures = {
        "steps": f"{logs[0].steps[-1]['step']:,.0f}",
        "ranks": _ranks(logs),
        "median step": human_time(median(step["seconds"] for step in steps)),
    }
    if resumes := resumed_at(logs):
        figures["resumed at step"] = ", ".join(f"{step:,}" for step in resumes)
    if speeds := [value for log in logs for value in log.values("tokens_per_second")]:
        figures["tokens/s, all ranks"] = f"{median(speeds):,.0f}"
    if parts := [value for log in logs for value in log.values("mfu")]:
        figures["model flops utilization"] = f"{median(parts):.1%}"
    timed = [step for step in steps if "exposed_seconds" in step and step["seconds"]]
    if waits := [step["exposed_seconds"] / step["seconds"] for step in timed]:
        figures["waited"] = f"{sum(waits) / len(waits):.1%}"
    if losses := logs[0].values("loss"):
        figures["last loss"] = f"{losses[-1]:.5g}"
    if skipped := sum(bool(step.get("skipped")) for step in logs[0].steps):
        figures["skipped steps"] = f"{skipped:,}"
    return figures


def resumed_at(logs: Sequence[RankLog]) -> list[int]:
    """Return the first steps of all stretches but the first one."""
    return [stretch.first for stretch in logs[0].stretches[1:]]


def _ranks(logs: Sequence[RankLog]) -> str:
    """Return the number of ranks, of each stretch if they differ."""
    counts = [str(_ranks_of(logs, stretch)) for stretch in logs[0].stretches] or [str(len(logs))]
    return ", then ".join(count for i, count in enumerate(counts) if i == 0 or count != counts[i - 1])


def _ranks_of(logs: Sequence[RankLog], stretch: Stretch) -> int:
    return sum(any(each.first == stretch.first for each in log.stretches) for log in logs)


STRETCH_HEADS = ("steps", "began", "ranks", "stage", "optimizer", "state", "gradients", "Ballast", "hosts")


def _stretch_lines(logs: Sequence[RankLog]) -> list[list[str]]:
    """Return a line for each stretch: who made its steps, and how."""
    stretches = logs[0].stretches
    lasts = [*(stretch.first - 1 for stretch in stretches[1:]), int(logs[0].steps[-1]["step"])]
    lines = []
    for stretch, last in zip(stretches, lasts):
        about = stretch.about
        began = _time(about["began"]) if is_number(about.get("began")) else "-"
        named = [str(about.get(name, "-")) for name in ("stage", "optimizer", "state_format", "gradient_format", "ballast")]
        same = (each for log in logs for each in log.stretches if each.first == stretch.first)
        hosts = sorted({str(each.about.get("host", "-")) for each in same})
        lines.append([f"{stretch.first:,} to {last:,}", began, str(_ranks_of(logs, stretch)), *named, ", ".join(hosts)])
    return lines


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):  # a damaged log has any number here
        return "-"


def _section(
    logs: Sequence[RankLog], heading: str, label: str, values: Mapping[str, str], *, scale: float = 1.0, from_zero: bool = True
) -> list[str]:
    """Draw values of the steps: their curves have names, and they are multiplied with `scale`. Return nothing if no step has
    any."""
    curves = [found for name, key in values.items() if (found := curve(logs, name, key, scale))]
    if not curves:
        return []
    drawing = draw_curves(label, curves, from_zero=from_zero, marks=resumed_at(logs))
    return [*([f"<h2>{heading}</h2>"] if heading else []), drawing.svg(alone=False)]


def curve(logs: Sequence[RankLog], name: str, key: str, scale: float, *, of: str = "") -> Curve | None:
    """Return a value of all ranks by step; None if no step has it. It is 0 in steps that have the value `of` without it."""
    values: dict[int, list[float]] = {}
    for log in logs:
        for step in log.steps:
            value = step.get(key) or 0.0 if of in step else step.get(key)
            if value is not None:
                values.setdefault(int(step["step"]), []).append(value * scale)
    return curve_of(name, values) if values else None


def _waits(logs: Sequence[RankLog], marks: Sequence[float]) -> str:
    """Draw the time in which the loop waited, by the lane that it waited for."""
    timed = [step for log in logs for step in log.steps if "exposed_seconds" in step]
    if not timed:
        return f"<p>{NOT_TIMED}</p>"
    lanes = sorted({name for step in timed for name in step if name.startswith(STALL)})
    lanes.sort(key=lambda lane: -sum(step.get(lane) or 0.0 for step in timed))
    if not lanes:
        return "<p>The loop has not waited.</p>"
    has_drive = any(_bytes_in(log, "nvme") for log in logs)
    names = {lane_in_words(lane.removeprefix(STALL), has_drive=has_drive): lane for lane in lanes}
    curves = (curve(logs, name, lane, 1e3, of="exposed_seconds") for name, lane in names.items())
    used = [each for each in curves if each is not None]
    return draw_stacked("milliseconds of a step, by lane", used, marks=marks).svg(alone=False)


def _bytes_in(log: RankLog, tier: str) -> int:
    return int(max(log.values(f"memory_bytes/{tier}"), default=0))


RANK_HEADS = ("rank", "host", "steps", "median step", "own time", "slowest in", *TIERS, "last loss")


def _rank_line(log: RankLog) -> list[str]:
    owns = [step["seconds"] - step["exposed_seconds"] for step in log.steps if step.get("exposed_seconds") is not None]
    slowest = log.values("slowest_rank")
    number = float(log.about.get("rank", log.rank))  # its number among the ranks of its training
    losses = log.values("loss")
    return [
        str(log.rank),
        str(log.about.get("host", "-")),
        f"{len(log.steps):,}",
        human_time(median(step["seconds"] for step in log.steps)),
        human_time(median(owns)) if owns else "-",
        f"{slowest.count(number) / len(slowest):.0%}" if slowest else "-",
        *(human_size(_bytes_in(log, tier)) if _bytes_in(log, tier) else "-" for tier in TIERS),
        f"{losses[-1]:.5g}" if losses else "-",
    ]


# --- Curves over the steps of a training ---


@dataclass(frozen=True)
class Curve:
    """Values by step. `low` and `high` bound the values that a mean stands for."""

    name: str
    steps: Sequence[float]
    means: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def curve_of(name: str, values: Mapping[int, Sequence[float]]) -> Curve:
    """Return the curve of values by step, of one or several ranks.

    >>> curve_of("loss", {1: [4.0, 2.0], 2: [1.0]})
    Curve(name='loss', steps=[1.0, 2.0], means=[3.0, 1.0], low=[2.0, 1.0], high=[4.0, 1.0])
    """
    steps = sorted(step for step, at in values.items() if at)
    size = max(1, -(-len(steps) // MOST_POINTS))
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    held = [[value for step in part for value in values[step]] for part in parts]
    return Curve(
        name,
        [sum(part) / len(part) for part in parts],
        [sum(part) / len(part) for part in held],
        [min(part) for part in held],
        [max(part) for part in held],
    )


def draw_curves(label: str, curves: Sequence[Curve], *, from_zero: bool = True, marks: Sequence[float] = ()) -> Drawing:
    """Draw each curve as a line, in front of the band of the values that it stands for. `marks` are steps at which the training
    resumed."""
    low = min(0.0 if from_zero else min(curve.low) for curve in curves)
    chart = _chart(label, curves, low, max(max(curve.high) for curve in curves))
    for style, curve in zip(STYLES, curves):
        upper = _points(chart, curve.steps, curve.high)
        chart.drawing.area([*upper, *reversed(_points(chart, curve.steps, curve.low))], style, opacity=0.2)
    for style, curve in zip(STYLES, curves):
        _draw_line(chart, curve.steps, curve.means, style)
    return _finished(chart, [curve.name for curve in curves], marks)


def draw_stacked(label: str, curves: Sequence[Curve], *, marks: Sequence[float] = ()) -> Drawing:
    """Draw the means of curves with the same steps as areas, one above the other."""
    sums = [0.0] * len(curves[0].steps)
    chart = _chart(label, curves, 0.0, max(map(sum, zip(*(curve.means for curve in curves)))))
    for style, curve in zip(STYLES, curves):
        above = [a + b for a, b in zip(sums, curve.means)]
        upper = _points(chart, curve.steps, above)
        chart.drawing.area([*upper, *reversed(_points(chart, curve.steps, sums))], style, opacity=0.7)
        _draw_line(chart, curve.steps, above, style)
        sums = above
    return _finished(chart, [curve.name for curve in curves], marks)


def _points(chart: Chart, steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    return [chart.place(step, value) for step, value in zip(steps, values)]


def _draw_line(chart: Chart, steps: Sequence[float], values: Sequence[float], style: str) -> None:
    points = _points(chart, steps, values)
    chart.drawing.line(points, style, width=1.5)
    if len(points) == 1:
        chart.drawing.dot(*points[0], 3, style)


def _chart(label: str, curves: Sequence[Curve], low: float, high: float) -> Chart:
    first, last = min(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    high = high if high > low else low + (abs(low) or 1.0)
    room = round_step((high - low) / 10)
    drawing = Drawing(WIDTH, TOP + HEIGHT + 52, label)
    up = Axis(high + room, TOP + HEIGHT, TOP, low=low - room if low else 0.0)
    across = Axis(last if last > first else first + 1, LEFT, RIGHT, low=first)
    draw_scales(drawing, across, up, ("step", label), whole=True)
    return Chart(drawing, across, up)


def _finished(chart: Chart, names: Sequence[str], marks: Sequence[float]) -> Drawing:
    """Draw the marks, and write the names of the curves at the upper right, if there are several."""
    for step in marks:
        x = chart.across.at(step)
        chart.drawing.line([(x, chart.up.end), (x, chart.up.begin)], "limit", dashes="4 4")
        chart.drawing.text(x, chart.up.begin + 38, f"resumed at {step:,.0f}", "limit", "middle")
    if len(names) > 1:
        entries = [*zip(STYLES, names)]
        chart.drawing.legend(RIGHT - legend_width(entries), 10, entries)
    return chart.drawing
