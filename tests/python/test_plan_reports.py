"""Tests of `ballast plan --plot` and `--html`: the places of points, the boxes of the timeline, and refused files."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import ballast
import ballast.tools.plan
import pytest
from ballast import _core
from ballast.new_files import write_output
from ballast.planning.planner import best, searched, unbeaten
from ballast.planning.request import request_plan
from ballast.sizes import human_amount, human_time
from ballast.tools.command_line import main
from ballast.tools.markup import Axis, escaped, round_step
from ballast.tools.plan_page import NARROWEST, boxes_of, draw_front, page

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
SVG = "{http://www.w3.org/2000/svg}"
MACHINE = ["--ranks", "4", "--gpu", "h100", "--host-memory", "1TiB"]


class Plans:
    """The plans of a request, as the command makes them."""

    def __init__(self, model, **options):
        self.request = request = request_plan(model, **options)
        self.chosen = best(request)
        self.all = searched(request, also=self.chosen, fitting=False)
        self.front = unbeaten(self.all, also=self.chosen)

    def drawing(self, **options):
        return ElementTree.fromstring(draw_front(self.all, self.front, self.chosen, **options).svg(alone=True))

    def page(self):
        return page(self.all, self.front, self.chosen)


@pytest.fixture(scope="module")
def plans():
    return Plans("llama-8b", ranks=4, gpu="h100", host_memory="1TiB", price=2.5)


def number(words):
    return float(words.replace(",", ""))


def ticks_of(drawing, anchor, along):
    """Return the values at the ticks of an axis, and their places: from the drawing alone."""
    texts = [text for text in drawing.iter(f"{SVG}text") if text.get("text-anchor") == anchor]
    values = [text for text in texts if re.fullmatch(r"[\d,.]+", text.text)]
    return [(number(text.text), float(text.get(along))) for text in values]


def scale(ticks):
    """Return the function from places to values, of the first and the last tick."""
    (low, begin), (high, end) = ticks[0], ticks[-1]
    return lambda place: low + (place - begin) * (high - low) / (end - begin)


def points(drawing, style, radius):
    """Return the memory in GiB and the tokens a second at the dots of a style."""
    across = scale(ticks_of(drawing, "middle", "x"))
    up = scale([(value, y - 4) for value, y in ticks_of(drawing, "end", "y")])  # the text is below the middle of its line
    dots = [dot for dot in drawing.iter(f"{SVG}circle") if (dot.get("class"), dot.get("r")) == (style, radius)]
    return [(across(float(dot.get("cx"))), up(float(dot.get("cy")))) for dot in dots if dot.find(f"{SVG}title") is not None]


def near(plan, found):
    memory, speed = plan.bytes_in("device") / GIB, plan.tokens_per_second
    return any(x == pytest.approx(memory, abs=0.1) and y == pytest.approx(speed, abs=0.003 * speed + 20) for x, y in found)


@pytest.mark.parametrize("titled", [True, False])
def test_the_marked_point_is_the_chosen_plan(plans, titled):
    drawing = plans.drawing(titled=titled)
    found = points(drawing, "chosen", "6")
    assert len(found) == 1 and near(plans.chosen, found)
    assert not any(near(plan, found) for plan in plans.front if plan is not plans.chosen)


def test_all_placements_and_the_limit_are_drawn(plans):
    drawing = plans.drawing()
    searched, front = points(drawing, "searched", "4"), points(drawing, "chosen", "4.5")
    fitting = [plan for plan in plans.all if plan.fits]
    assert len(fitting) > len(plans.front) == len(front) > 2
    assert all(near(plan, searched) for plan in fitting) and len(searched) == len(fitting)
    assert all(near(plan, front) for plan in plans.front)
    across = scale(ticks_of(drawing, "middle", "x"))
    lines = {line.get("class"): line for line in drawing.iter(f"{SVG}path")}
    x = float(re.match(r"M([\d.]+) ", lines["limit-line"].get("d"))[1])
    assert across(x) == pytest.approx(plans.chosen.limit_of("device") / GIB, abs=0.1)
    assert lines["chosen-line"].get("d").count("L") == len(front) - 1


def test_placements_that_do_not_fit_are_hollow_or_counted():
    plans = Plans("llama-70b", ranks=1, gpu="h200", host_memory="512GiB", drive_space="30TB", resumable=True, headroom=0)
    drawing = plans.drawing()
    hollow = points(drawing, "searched-line", "4")
    limit = 1.2 * plans.chosen.limit_of("device")
    expected = [plan for plan in plans.all if not plan.fits and plan.bytes_in("device") <= limit]
    hidden = [plan for plan in plans.all if plan.bytes_in("device") > limit]
    assert expected and hidden
    assert any(plan.seconds < plans.chosen.seconds for plan in expected) and plans.front[0] == plans.chosen
    assert all(each.fits and each.bytes_in("device") < plans.chosen.bytes_in("device") for each in plans.front[1:])
    assert searched(plans.request, also=plans.chosen) == [plan for plan in plans.all if plan.fits]
    assert len(hollow) == len(expected) and all(near(plan, hollow) for plan in expected)
    texts = [text.text for text in drawing.iter(f"{SVG}text")]
    assert "do not fit" in texts and f"{len(hidden)} need more memory than shown" in texts


def test_a_limit_far_above_all_points_is_named():
    texts = [text.text for text in Plans("gpt2", ranks=2).drawing().iter(f"{SVG}text")]
    assert any("limit 75.24 GiB, to the right" in text for text in texts)


@pytest.mark.parametrize("high", [0.0123, 1, 7.3, 84, 999, 30_442, 2.5e6])
def test_ticks_are_round_and_as_many_as_fit(high):
    ticks = Axis(high, 0, 100).ticks(6)
    values = [value for value, _ in ticks]
    assert 3 <= len(ticks) <= 8 and values[0] == 0 and values[-1] <= high * 1.000001
    assert values[1] == pytest.approx(round_step(values[1])) and values[1] * len(values) > high
    assert [number(words) for _, words in ticks] == pytest.approx(values)


def test_the_page_has_each_lane_and_needs_no_other_file(plans):
    text = plans.page()
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.text]
    timeline = next(drawing for drawing in root.iter(f"{SVG}svg") if "Timeline" in drawing.get("aria-label"))
    labels = [text.text for text in timeline.iter(f"{SVG}text") if text.get("text-anchor") == "end"]
    assert all(lane.name in labels for lane in _core.Lane)
    assert all(row in words for tier in plans.chosen.memory for row in plans.chosen.rows_of(tier))
    assert human_amount(plans.chosen.cost_per_million_tokens) in words and plans.chosen.text() in words
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert any(title.startswith("backward layers.3: ") for title in titles)
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import", text)
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    (marked,) = (row for row in root.iter("tr") if row.get("class") == "chosen")
    cells = [cell.text for cell in marked]
    assert cells[3:5] == [human_time(plans.chosen.seconds), f"{plans.chosen.tokens_per_second:,.0f}"]


def test_the_page_of_a_large_model_is_small():
    text = Plans("llama-70b", ranks=8, gpu="h100", host_memory="2TiB", drive_space="30TB", micro_steps=8).page()
    assert len(text.encode()) < 1_000_000
    assert text.count("<rect") > 1000


def test_the_timeline_has_the_times_of_the_step(plans):
    entries = plans.chosen.timeline()
    uses = [entry for entry in entries if entry.kind == "use"]
    assert {entry.lane for entry in uses} == {_core.Lane.compute}
    assert [entry.begin for entry in uses] == sorted(entry.begin for entry in uses)
    ends = [entry.end for entry in entries if entry.kind in ("use", "agree")]
    assert max(ends) == pytest.approx(plans.chosen.seconds) and min(entry.end for entry in entries) > 0
    layers = [entry.unit for entry in uses if entry.phase is _core.Phase.forward]
    assert [name for name in layers if "layers" in name] == [f"layers.{i}" for i in range(32)]
    busy = {lane: sum(box.busy for box in boxes) for lane, boxes in boxes_of(entries, plans.chosen.seconds).items()}
    assert busy["compute"] == pytest.approx(plans.chosen.critical["compute"], rel=0.01)
    assert busy["disk"] == busy["fetch"] == 0


def test_the_timeline_waits_where_the_training_does():
    question, placement = ballast.plan("llama-8b", gpu="h100", host_memory="1TiB")._simulated("timeline")
    assert not question.waits_for_updates and any(entry.of_earlier_step for entry in question.timeline(placement))
    question.waits_for_updates = True
    assert not any(entry.of_earlier_step for entry in question.timeline(placement))


def test_the_guide_shows_the_drawing_of_its_command(plans):
    drawn = draw_front(plans.all, plans.front, plans.chosen).svg(alone=True)
    shown = (ROOT / "docs" / "drawings" / "front.svg").read_text()
    assert shown == drawn, "draw it again: the command is in docs/guides/fit-a-model.md"


def entry(begin, end, **given):
    usual = {"lane": _core.Lane.update, "phase": _core.Phase.step, "kind": "update", "unit": "h.0", "of_earlier_step": False}
    return SimpleNamespace(begin=begin, end=end, **{**usual, **given})


def test_short_operations_are_merged_and_none_is_lost():
    entries = [entry(i * 1e-4, i * 1e-4 + 6e-5, unit=f"h.{i}") for i in range(10_000)]
    boxes = boxes_of(entries, 1.0)["update"]
    assert len(boxes) <= 1 / NARROWEST + 1
    assert sum(box.count for box in boxes) == 10_000
    assert sum(box.busy for box in boxes) == pytest.approx(0.6)
    assert all(box.end <= after.begin for box, after in zip(boxes, boxes[1:], strict=False))
    assert boxes[0].describe().startswith("update h.0 to h.")


def test_operations_stay_apart_where_they_can_be_seen():
    forward = {"lane": _core.Lane.compute, "kind": "use", "phase": _core.Phase.forward}
    entries = [
        entry(-0.5, 0.1, of_earlier_step=True),
        entry(0.1, 0.2),
        entry(0.2, 0.3),  # the next tile of the same unit
        entry(0.3, 0.4, unit="h.1"),
        entry(0.6, 1.5, unit="h.1"),
        entry(0.0, 0.5, **forward),
    ]
    lanes = boxes_of(entries, 1.0)
    found = [(box.begin, box.end, box.count, [*box.styles]) for box in lanes["update"]]
    assert found == [(0, 0.1, 1, ["earlier"]), (0.1, 0.3, 2, ["step"]), (0.3, 0.4, 1, ["step"]), (0.6, 1.0, 1, ["step"])]
    assert lanes["compute"][0].describe() == "forward h.0: 500 ms, at 0 ms"
    assert lanes["update"][1].describe() == "update h.0, 2 operations: 200 ms, at 100 ms"


def test_a_name_may_have_any_character(tmp_path):
    plans = Plans({"a<b>&\x01\"'.0.weight": (512, 512)}, gpu_memory="8GiB")
    titles = [element.text for element in ElementTree.fromstring(plans.page()).iter(f"{SVG}title")]
    assert any("a<b>&\ufffd\"'.0" in title for title in titles)
    write_output(tmp_path / "page.html", escaped("\udc80"))
    assert (tmp_path / "page.html").read_bytes() == "\ufffd".encode()


def test_the_command_writes_both_files_and_prints_the_plan(tmp_path, capsys):
    plot, html = tmp_path / "front.svg", tmp_path / "plan.HTML"
    html.write_text("old")
    assert main(["plan", "llama-8b", *MACHINE, "--price", "2.5", "--plot", str(plot), "--html", str(html)]) == 0
    with_files = capsys.readouterr().out
    assert main(["plan", "llama-8b", *MACHINE, "--price", "2.5"]) == 0
    assert capsys.readouterr().out == with_files  # placements that do not fit stay out of the table
    same = Plans("llama-8b", ranks=4, gpu="h100", host_memory="1TiB", price=2.5)
    assert plot.read_text() == draw_front(same.all, same.front, same.chosen).svg(alone=True)
    assert html.read_text() == same.page()
    assert sorted(os.listdir(tmp_path)) == ["front.svg", "plan.HTML"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--plot", "front.png"], "--plot writes .svg files only"),
        (["--plot", "front"], "--plot writes .svg files only"),
        (["--html", "page.svg"], "--html writes .html files only"),
        (["--plot", ""], "--plot writes .svg files only"),
        (["--plot", "nowhere/front.svg"], "there is no directory nowhere"),
        (["--plot", "file/front.svg"], "there is no directory file"),
        (["--html", "folder.html"], "it is a directory"),
        (["--plot", "front.svg", "--program"], "--program"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_search(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(ballast.tools.plan, "best", lambda request: pytest.fail("the search began"))
    assert main(["plan", "gpt2", *words]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and shown.out == ""


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as a read-only file system answers, to root too
    assert main(["plan", "gpt2", "--html", str(tmp_path / "page.html")]) == 2
    assert "may not create files" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target, link = tmp_path / "front.svg", tmp_path / "link.svg"
    target.write_text("old")
    link.symlink_to(target)

    def full(source, name):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(ballast.FailureError, match="cannot write .*: No space left"):
            write_output(link, "new")
    assert target.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["front.svg", "link.svg"]
    write_output(link, "new")
    assert target.read_text() == "new" and link.is_symlink()
