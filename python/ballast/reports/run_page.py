"""Write the HTML page of a training from the records of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

from ballast.checks import is_number
from ballast.reports.curves import Curve, curve_of, draw_curves, draw_stacked
from ballast.reports.document import document, figures_list, table
from ballast.reports.run_log import RankLog, Step, Stretch
from ballast.reports.svg import escaped
from ballast.sizes import human_size, human_time
from ballast.tiers import lane_in_words

TIERS = ("device", "host", "nvme")
STALL = "stall_seconds/"
MIB = 1 << 20
SEVERAL = "A line is the mean of the ranks, and of neighbouring steps in a long run; the band around it spans all of them."
NOT_TIMED = "The time that the loop waited is not recorded: on a GPU, wrap(timeline=True) measures it."


def run_page(name: str, logs: Sequence[RankLog]) -> str:
    """Return the page of a run."""
    parts = [f"<p>{escaped(_described(logs))}</p>", figures_list(summary(logs)), f"<p>{SEVERAL}</p>"]
    if lines := _stretch_lines(logs):
        parts += ["<h2>Stretches</h2>", table(STRETCH_HEADS, lines)]
    marks = resumed_at(logs)
    if losses := curve(logs, "loss", lambda step: step.get("loss")):
        parts += ["<h2>Loss</h2>", draw_curves("loss", [losses], from_zero=False, marks=marks).svg(alone=False)]
    parts += _optimization(logs, marks)
    parts += ["<h2>Time of a step</h2>", _times(logs, marks)]
    if speed := curve(logs, "tokens/s", lambda step: step.get("tokens_per_second")):
        parts.append(draw_curves("tokens/s, all ranks", [speed], marks=marks).svg(alone=False))
    parts += ["<h2>Waiting</h2>", _waits(logs, marks), "<h2>Memory of a rank</h2>", _memory(logs, marks)]
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
    if waits := [waited for step in steps if (waited := waited_part(step)) is not None]:
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


def _optimization(logs: Sequence[RankLog], marks: Sequence[float]) -> list[str]:
    """Draw the norm of the gradients and the learning rates."""
    parts = []
    if norms := curve(logs, "norm", lambda step: step.get("grad_norm")):
        parts += ["<h2>Gradient norm</h2>", draw_curves("norm before clipping", [norms], marks=marks).svg(alone=False)]
    names = sorted({name for step in logs[0].steps for name in step if name == "lr" or name.startswith("lr/")})
    if rates := [found for name in names if (found := curve(logs, name, _value_of(name)))]:
        parts += ["<h2>Learning rate</h2>", draw_curves("learning rate", rates, marks=marks).svg(alone=False)]
    return parts


def _value_of(name: str) -> Callable[[Step], Any]:
    return lambda step: step.get(name)


def waited_part(step: Step) -> float | None:
    """Return the part of a step in which the loop waited; None if it was not measured."""
    if "exposed_seconds" not in step or not step["seconds"]:
        return None
    return float(step["exposed_seconds"] / step["seconds"])


def curve(logs: Sequence[RankLog], name: str, value_of: Callable[[Step], Any]) -> Curve | None:
    """Return a value of all ranks by step; None if no step has it."""
    values: dict[int, list[float]] = {}
    for log in logs:
        for step in log.steps:
            if (value := value_of(step)) is not None:
                values.setdefault(int(step["step"]), []).append(float(value))
    return curve_of(name, values) if values else None


def _described(logs: Sequence[RankLog]) -> str:
    about = logs[0].about
    words = [f"first step at {_time(logs[0].steps[0]['at'])}"]
    if "ballast" in about:
        words.append(f"recorded by Ballast {about['ballast']}")
    return "; ".join(words)


def _times(logs: Sequence[RankLog], marks: Sequence[float]) -> str:
    curves = [curve(logs, "step", lambda step: step["seconds"] * 1e3)]
    if any("exposed_seconds" in step for log in logs for step in log.steps):
        curves.append(curve(logs, "of it waited", lambda step: _milliseconds(step.get("exposed_seconds"))))
    return draw_curves("milliseconds", [each for each in curves if each is not None], marks=marks).svg(alone=False)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


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
    curves = [curve(logs, lane_in_words(lane.removeprefix(STALL), has_drive=has_drive), _stall_of(lane)) for lane in lanes]
    used = [each for each in curves if each is not None]
    return draw_stacked("milliseconds of a step, by lane", used, marks=marks).svg(alone=False)


def _stall_of(lane: str) -> Callable[[Step], float | None]:
    """Return a function of a step. A lane without an entry was not waited for."""
    return lambda step: _milliseconds(step.get(lane) or 0.0) if "exposed_seconds" in step else None


def _memory(logs: Sequence[RankLog], marks: Sequence[float]) -> str:
    curves = [curve(logs, tier, _mebibytes_in(tier)) for tier in TIERS if any(_bytes_in(log, tier) for log in logs)]
    used = [each for each in curves if each is not None]
    return draw_curves("MiB by tier", used, marks=marks).svg(alone=False) if used else "<p>Ballast keeps nothing.</p>"


def _mebibytes_in(tier: str) -> Callable[[Step], float | None]:
    return lambda step: None if (count := step.get(f"memory_bytes/{tier}")) is None else count / MIB


def _bytes_in(log: RankLog, tier: str) -> int:
    return int(max(log.values(f"memory_bytes/{tier}"), default=0))


RANK_HEADS = ("rank", "host", "steps", "median step", "own time", "slowest in", *TIERS, "last loss")


def _rank_line(log: RankLog) -> list[str]:
    owns = [step["seconds"] - step["exposed_seconds"] for step in log.steps if step.get("exposed_seconds") is not None]
    slowest = log.values("slowest_rank")
    number = float(log.about.get("rank", log.rank))  # among the ranks of its training
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
