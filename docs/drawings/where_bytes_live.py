"""Draw where the bytes of a parameter live. Write where-bytes-live.svg, or the named file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from drawing import Drawing

ADDED_LINE = 'optimizer = ballast.wrap(optimizer, model, stage=3, offload="nvme:/scratch")'
COLUMNS = {"device": 190, "host": 430, "drive": 670}
SUBTITLES = {"device": "GPU memory", "host": "host memory", "drive": "NVMe"}
WIDTH = 210  # the width of a box


class Row(NamedTuple):
    name: str
    size: str  # bytes of one parameter, over all ranks
    kept: str  # the tier of the shard
    shard: str
    visits: dict[str, str]  # bytes that are there for a time; the keys are tiers


# The rows show a training in bf16 with the state format `split`, on GPUs: <ballast/placement.h> has all placements.
ROWS = [
    Row("parameters", "2 bytes, bf16", "device", "shard: 2/N bytes", {"device": "full, while its unit runs"}),
    Row("gradients", "4 bytes, fp32 sum", "host", "shard: 4/N bytes", {"device": "full, until they are summed"}),
    Row("optimizer state", "10 bytes, split", "drive", "shard: 10/N bytes", {"host": "a few tiles, to be updated"}),
]


def draw_row(drawing: Drawing, row: Row, top: int) -> None:
    """Fill the box of the tier that keeps the shard; draw dashed boxes in tiers that hold bytes for a time."""
    drawing.text(24, top + 26, row.name, "bold")
    drawing.text(24, top + 46, row.size, "quiet")
    for tier, left in COLUMNS.items():
        both = tier == row.kept and tier in row.visits
        height = 34 if both else 56
        if tier == row.kept:
            drawing.box(left, top, WIDTH, height, "ours")
            drawing.text(left + WIDTH / 2, top + height / 2 + 5, row.shard, "on-ours", "middle")
        if tier in row.visits:
            begin = top + 40 if both else top
            drawing.box(left, begin, WIDTH, 28 if both else height, "for-a-time")
            drawing.text(left + WIDTH / 2, begin + (19 if both else height / 2 + 5), row.visits[tier], "quiet", "middle")


def draw() -> Drawing:
    drawing = Drawing(904, 432, "Where Ballast keeps parameters, gradients and optimizer state of a rank")
    drawing.text(24, 36, ADDED_LINE, "code")
    drawing.text(24, 62, "Where one rank of N keeps the bytes of a parameter, with this line, on GPUs", "quiet")
    for tier, left in COLUMNS.items():
        drawing.text(left + WIDTH / 2, 100, tier, "title", "middle")
        drawing.text(left + WIDTH / 2, 118, SUBTITLES[tier], "quiet", "middle")
    for number, row in enumerate(ROWS):
        top = 136 + 86 * number
        draw_row(drawing, row, top)
        drawing.line(24, top + 71, 880, top + 71)
    drawing.box(190, 402, 22, 14, "ours")
    drawing.text(220, 414, "kept here", "quiet")
    drawing.box(310, 402, 22, 14, "for-a-time")
    drawing.text(340, 414, "here for a time: gathered or read ahead, then released", "quiet")
    return drawing


if __name__ == "__main__":
    draw().write(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("where-bytes-live.svg"))
