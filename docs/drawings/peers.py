"""Draw tokens a second and memory of Ballast and its peers as bars, from the recorded run. Write peers.svg, or the named
file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from drawing import RESULTS, Drawing  # this finds the modules of benchmarks/

from suite import read_rows  # isort: skip

MODEL = "303M"
SYSTEMS = {  # the case in the record: its name in the chart
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "DeepSpeed ZeRO 3": "DeepSpeed ZeRO 3",
    "DeepSpeed ZeRO 3, state on the drive": "DeepSpeed ZeRO 3, NVMe",
    "Ballast stage 3": "Ballast stage 3",
    "Ballast stage 3, state on the drive": "Ballast stage 3, NVMe",
    "Ballast stage 3, updated in backward, compact state": "Ballast stage 3, compact *",
    "Ballast stage 3, state on the drive, updated in backward, compact state": "Ballast stage 3, compact *, NVMe",
}
LABELS, BARS, GAP, ROW = 300, 216, 70, 30  # pixels
TOP = 96


class Bar(NamedTuple):
    name: str
    tokens: float  # a second
    memory: float  # MiB


def recorded() -> list[Bar]:
    values = {row["case"]: row["value"] for row in read_rows(RESULTS / "peers-training.jsonl")[1:]}
    return [Bar(name, values[f"{MODEL}: {case}"], values[f"{MODEL}: {case}, memory"]) for case, name in SYSTEMS.items()]


def draw_column(drawing: Drawing, left: int, title: str, note: str, values: dict[str, float]) -> None:
    drawing.text(left, 58, title, "title")
    drawing.text(left, 78, note, "quiet")
    longest = max(values.values())
    for number, (name, value) in enumerate(values.items()):
        top = TOP + ROW * number
        length = BARS * value / longest
        drawing.box(left, top, length, 20, "ours" if name.startswith("Ballast") else "theirs")
        drawing.text(left + length + 8, top + 15, f"{value:,.0f}")


def draw() -> Drawing:
    bars = recorded()
    height = TOP + ROW * len(bars) + 54
    drawing = Drawing(LABELS + 2 * (BARS + GAP) + 24, height, "Throughput and memory of Ballast, DDP, FSDP2 and DeepSpeed")
    drawing.text(24, 30, f"A GPT of {MODEL} parameters in bf16, two ranks on the CPU cores of one machine", "bold")
    for number, bar in enumerate(bars):
        drawing.text(LABELS - 12, TOP + ROW * number + 15, bar.name, "bold" if "Ballast" in bar.name else "", "end")
    second = LABELS + BARS + GAP
    draw_column(drawing, LABELS, "tokens a second", "more is better", {bar.name: bar.tokens for bar in bars})
    draw_column(drawing, second, "peak MiB of a rank", "less is better", {bar.name: bar.memory for bar in bars})
    note = '* update_in_backward=True, state_format="compact". Recorded in benchmarks/results/peers-training.jsonl.'
    drawing.text(24, height - 18, note, "quiet")
    return drawing


if __name__ == "__main__":
    draw().write(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("peers.svg"))
