"""Plot memory against throughput: a labelled point for each configuration, and the front of the unbeaten ones.

It reads the file that a suite has written with --details: each line is a Row. Each model has a panel of its own.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple, TypedDict

MEBIBYTE = 1 << 20

# Pixels: around a label; around the middle of a point; how near points crowd each other.
GAP = 4.0
MARKER = 7.0
CROWD = 150.0


class Row(TypedDict):
    """The fields of a line that are used here; it may have more."""

    case: str
    model: str
    machine: str
    group: str  # points of a group have the same marker
    tokens_per_second: float
    plotted: str  # the name of the next field's quantity
    plotted_bytes: float


class Point(NamedTuple):
    name: str
    group: str
    mebibytes: float
    tokens_per_second: float


class Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.top <= other.bottom or other.top <= self.bottom)

    def inside(self, other: "Box") -> bool:
        wide = other.left <= self.left and self.right <= other.right
        return wide and other.bottom <= self.bottom and self.top <= other.top


def point_of(row: Row) -> Point:
    return Point(row["case"], row["group"], row["plotted_bytes"] / MEBIBYTE, row["tokens_per_second"])


def front(points: list[Point]) -> list[Point]:
    """Return the points that no other point beats in both memory and speed, from the smallest to the fastest."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.mebibytes, -point.tokens_per_second)):
        if not best or point.tokens_per_second > best[-1].tokens_per_second:
            best.append(point)
    return best


def place_labels(
    at: list[tuple[float, float]], sizes: list[tuple[float, float]], page: Box, taken: list[Box]
) -> list[Box]:
    """Return a box for each label: near its point, on the page, and clear of points, other labels and taken boxes.

    Everything is in pixels. The most crowded points come first; a label without room is put above its point.
    """
    placed = [*taken, *(Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in at)]
    boxes: dict[int, Box] = {}
    neighbours = [sum(math.dist(point, other) < CROWD for other in at) for point in at]
    for i in sorted(range(len(at)), key=lambda i: -neighbours[i]):
        boxes[i] = next(
            (box for box in places(at[i], sizes[i]) if box.inside(page) and not any(map(box.overlaps, placed))),
            next(places(at[i], sizes[i])),
        )
        placed.append(boxes[i])
    return [boxes[i] for i in range(len(at))]


def places(at: tuple[float, float], size: tuple[float, float]):
    """Yield boxes around a point, in growing circles."""
    (x, y), (width, height) = at, size
    for radius, turn in itertools.product(range(12, 400, 6), range(24)):
        angle = 2 * math.pi * turn / 24
        across, up = math.cos(angle), math.sin(angle)
        left = x + radius * across - width * (1 - across) / 2
        bottom = y + radius * up - height * (1 - up) / 2
        yield Box(left - GAP / 2, bottom - GAP / 2, left + width + GAP / 2, bottom + height + GAP / 2)


def draw(rows: list[Row], to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(
        len(models), figsize=(13, 8 * len(models)), layout="constrained", squeeze=False
    )
    drawn = [
        draw_panel(axes, [row for row in rows if row["model"] == model])
        for (axes,), model in zip(panels, models, strict=True)
    ]
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels are placed for the axes as they are now
    for (axes,), points in zip(panels, drawn, strict=True):
        add_labels(axes, points, {point.name for point in front(points)}, axes.get_legend())
    figure.savefig(to)


def draw_panel(axes, rows: list[Row]) -> list[Point]:
    """Draw one model, without the labels of its points."""
    points = [point_of(row) for row in rows]
    groups = list(dict.fromkeys(point.group for point in points))
    for group, marker in zip(groups, itertools.cycle("osD^"), strict=False):
        own = [point for point in points if point.group == group]
        axes.plot(*coordinates(own), marker, markersize=8, zorder=3, label=group)
    best = front(points)
    axes.step(*coordinates(best), where="post", color="0.6", zorder=1, label="none takes less memory and is faster")
    axes.set_xlabel(f"memory of a rank, {rows[0]['plotted']} (MiB)")
    axes.set_ylabel("tokens a second, all ranks together")
    axes.set_xlim(0, 1.12 * max(point.mebibytes for point in points))
    axes.set_ylim(0, 1.12 * max(point.tokens_per_second for point in points))
    axes.grid(color="0.93")
    axes.set_title(f"{rows[0]['model']}\non {rows[0]['machine']}", loc="left")
    axes.legend(loc="lower right", frameon=False)
    return points


def coordinates(points: list[Point]) -> tuple[list[float], list[float]]:
    return [point.mebibytes for point in points], [point.tokens_per_second for point in points]


def add_labels(axes, points: list[Point], bold: set[str], legend) -> None:
    renderer = axes.figure.canvas.get_renderer()

    def in_pixels(artist) -> Box:
        return Box(*artist.get_window_extent(renderer).extents)

    at = [tuple(axes.transData.transform((point.mebibytes, point.tokens_per_second))) for point in points]
    texts = [axes.text(0, 0, point.name, fontsize=9, weight="bold" if point.name in bold else None) for point in points]
    extents = [in_pixels(text) for text in texts]
    sizes = [(box.right - box.left, box.top - box.bottom) for box in extents]
    boxes = place_labels(at, sizes, in_pixels(axes), [in_pixels(legend)])
    for text, point, box in zip(texts, at, boxes, strict=True):
        text.remove()
        middle = ((box.left + box.right) / 2, (box.bottom + box.top) / 2)
        axes.annotate(
            text.get_text(),
            xy=axes.transData.inverted().transform(point),
            xytext=axes.transData.inverted().transform(middle),
            ha="center",
            va="center",
            fontsize=9,
            weight=text.get_weight(),
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3},
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="plot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("details", type=Path, help="lines of JSON that the suite has written")
    parser.add_argument("file", type=Path, help="to draw: .svg, .png or .pdf")
    options = parser.parse_args()
    draw([json.loads(line) for line in options.details.read_text().splitlines()], options.file)


if __name__ == "__main__":
    main()
