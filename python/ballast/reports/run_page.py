"""Write the HTML page of a training from the records of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

from ballast.reports.curves import Curve, curve_of, draw_curves, draw_stacked
from ballast.reports.document import document, figures_list, table
from ballast.reports.run_log import RankLog, Step
from ballast.reports.svg import escaped
from ballast.sizes import human_size, human_time

TIERS = ("device", "host", "nvme")
STALL = "stall_seconds/"
MIB = 1 << 20
SEVERAL = "A line is the mean of the ranks, and of neighbouring steps in a long run; the band around it spans all of them."
NOT_TIMED = "The time that the loop waited is not recorded: on a GPU, wrap(timeline=True) measures it."


def run_page(name: str, logs: Sequence[RankLog]) -> str:
    """Return the page of a run."""
    parts = [f"<p>{escaped(_described(logs))}</p>", figures_list(summary(logs)), f"<p>{SEVERAL}</p>"]
    if losses := curve(logs, "loss", lambda step: step.get("loss")):
        parts += ["<h2>Loss</h2>", draw_curves("loss", [losses], from_zero=False).svg(alone=False)]
    parts += ["<h2>Time of a step</h2>", _times(logs)]
    if speed := curve(logs, "tokens/s", lambda step: step.get("tokens_per_second")):
        parts.append(draw_curves("tokens/s, all ranks", [speed]).svg(alone=False))
    parts += ["<h2>Waiting</h2>", _waits(logs), "<h2>Memory of a rank</h2>", _memory(logs)]
    parts += ["<h2>Ranks</h2>", table(RANK_HEADS, [_rank_line(log) for log in logs])]
    if owners := logs[0].about.get("memory"):
        parts += [f"<h2>Memory of rank {logs[0].rank} by owner</h2>", f"<pre>{escaped(str(owners))}</pre>"]
    return document(name, parts)


def summary(logs: Sequence[RankLog]) -> dict[str, str]:
    """Return what a reader wants to know first, by name."""
    steps = [step for log in logs for step in log.steps]
    figures = {
        "steps": f"{logs[0].steps[-1]['step']:,.0f}",
        "ranks": str(len(logs)),
        "median step": human_time(median(step["seconds"] for step in steps)),
    }
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
    at = datetime.fromtimestamp(logs[0].steps[0]["at"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    words = [f"first step at {at}"]
    if "optimizer" in about:
        words.append(f"{about['optimizer']}, stage {about.get('stage')}, state in {about.get('state_format')}")
    if "ballast" in about:
        words.append(f"recorded by Ballast {about['ballast']}")
    return "; ".join(words)


def _times(logs: Sequence[RankLog]) -> str:
    curves = [curve(logs, "step", lambda step: step["seconds"] * 1e3)]
    if any("exposed_seconds" in step for log in logs for step in log.steps):
        curves.append(curve(logs, "of it waited", lambda step: _milliseconds(step.get("exposed_seconds"))))
    return draw_curves("milliseconds", [each for each in curves if each is not None]).svg(alone=False)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _waits(logs: Sequence[RankLog]) -> str:
    """Draw the time in which the loop waited, by the lane that it waited for."""
    timed = [step for log in logs for step in log.steps if "exposed_seconds" in step]
    if not timed:
        return f"<p>{NOT_TIMED}</p>"
    lanes = sorted({name for step in timed for name in step if name.startswith(STALL)})
    lanes.sort(key=lambda lane: -sum(step.get(lane) or 0.0 for step in timed))
    if not lanes:
        return "<p>The loop has not waited.</p>"
    curves = [curve(logs, lane.removeprefix(STALL), _stall_of(lane)) for lane in lanes]
    return draw_stacked("milliseconds of a step, by lane", [each for each in curves if each is not None]).svg(alone=False)


def _stall_of(lane: str) -> Callable[[Step], float | None]:
    """Return a function of a step. A lane without an entry was not waited for."""
    return lambda step: _milliseconds(step.get(lane) or 0.0) if "exposed_seconds" in step else None


def _memory(logs: Sequence[RankLog]) -> str:
    curves = [curve(logs, tier, _mebibytes_in(tier)) for tier in TIERS if any(_bytes_in(log, tier) for log in logs)]
    used = [each for each in curves if each is not None]
    return draw_curves("MiB by tier", used).svg(alone=False) if used else "<p>Ballast keeps nothing.</p>"


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
