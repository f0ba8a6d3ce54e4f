"""Tests that the drawing of loss curves shows finished variants, and them alone."""

import json
import re
import sys
from pathlib import Path

import pytest
from docs.blocks import PAGES, ROOT

sys.path += [str(PAGES / "drawings"), *(str(ROOT / "benchmarks" / folder) for folder in ("harness", "losses"))]

import format_losses  # noqa: E402 (its folder is on the path only now)
from formats import CONTESTS  # noqa: E402

REFERENCE, _, COMPACT, FOUR_BITS = CONTESTS[0].contenders[:4]


def record_runs(folder: Path, losses: dict[str, list[float]]) -> Path:
    """Write runs whose curves fall by one from step 10 to step 20."""
    rows = [
        {"formats": contender, "seed": seed, "curve": [[10, loss + 1], [20, loss]]}
        for contender, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bands(folder: Path, losses: dict[str, list[float]]) -> list[list[format_losses.Band]]:
    path = record_runs(folder, losses)
    return [format_losses.bands_of(contest, contest.read(path)) for contest in CONTESTS]


def drawn(folder: Path, losses: dict[str, list[float]]) -> str:
    format_losses.draw(record_runs(folder, losses)).write(folder / "drawing.svg")
    return (folder / "drawing.svg").read_text()


def test_a_band_has_the_seeds_and_their_differences(tmp_path: Path):
    losses = {REFERENCE: [1.0, 2.0, 3.0], COMPACT: [1.5, 2.25, 3.0]}
    (reference, band), tuned = bands(tmp_path, losses)
    assert (reference.number, band.number, tuned) == (0, 2, [])
    assert band.steps == [10, 20]
    assert band.of_seeds == [[2.5, 1.5], [3.25, 2.25], [4.0, 3.0]]
    assert (band.at_each_point(min), band.at_each_point(max)) == ([2.5, 1.5], [4.0, 3.0])
    assert format_losses.differences(band, reference).of_seeds == [[0.5, 0.5], [0.25, 0.25], [0.0, 0.0]]


def test_an_unfinished_variant_has_no_curve(tmp_path: Path):
    both = {REFERENCE: [1.0, 2.0, 3.0], COMPACT: [1.5, 2.25, 3.0]}
    without, with_unfinished = drawn(tmp_path, both), drawn(tmp_path, {**both, FOUR_BITS: [9.0, 9.0]})
    assert without == with_unfinished
    assert "state 4bit, gradients fp32: unfinished" in without
    assert "state compact, gradients fp32: unfinished" not in without
    assert drawn(tmp_path, {**both, FOUR_BITS: [9.0, 9.0, 9.0]}) != without


@pytest.mark.parametrize("losses", [{}, {COMPACT: [1.0, 2.0, 3.0]}], ids=["no runs", "no reference"])
def test_without_the_reference_no_difference_is_drawn(tmp_path: Path, losses: dict[str, list[float]]):
    text = drawn(tmp_path, losses)
    assert "difference from fp32" not in text
    assert text.count("nothing is finished") == len(CONTESTS) - len(losses)


def test_zero_is_in_the_middle_of_differences(tmp_path: Path):
    text = drawn(tmp_path, {REFERENCE: [1.0, 2.0, 3.0], COMPACT: [1.5, 2.25, 3.0]})
    labels = re.findall(r'text-anchor="end">([+-][\d.]+)<', text)
    assert labels == ["+0.550", "+0.275", "+0.000", "-0.275", "-0.550"]


def test_fine_tuning_is_drawn_apart(tmp_path: Path):
    losses = {contest.reference: [1.0, 2.0, 3.0] for contest in CONTESTS}
    assert [[band.number for band in each] for each in bands(tmp_path, losses)] == [[0], [0]]
