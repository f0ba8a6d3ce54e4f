"""Tests that drawings equal the output of their scripts, and that a page quotes its golden program exactly."""

import importlib.util
import json
import sys

import pytest
from docs.blocks import PAGES, ROOT, blocks_of

SCRIPT = PAGES / "drawings" / "step_as_a_program.py"  # test_readme.py tests the drawings of README
GOLDEN = ROOT / "tests" / "plan" / "golden"


def load(script):
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_what_its_script_draws():
    module = load(SCRIPT)
    drawn = module.draw(module.PROGRAM.read_text())
    assert module.DRAWING.read_text() == drawn, f"draw it again: python3 {SCRIPT.relative_to(ROOT)}"


def quoted(page):
    """Return the lines of a program that a page shows."""
    lines = [line for block in blocks_of(page) if block.language == "text" for line in block.text.splitlines()]
    return [line for line in lines if line.startswith(("slot ", "entry ", "%"))]


def misquoted(lines, program):
    """Return the first line that the program does not have after the lines before it."""
    rest = iter(program)
    return next((line for line in lines if line not in rest), None)


def test_the_page_quotes_the_program_as_it_is():
    lines = quoted(PAGES / "concepts" / "step-as-a-program.md")
    assert len(lines) > 20
    assert misquoted(lines, (GOLDEN / "stage3_nvme.txt").read_text().splitlines()) is None


def test_a_line_that_the_program_does_not_have_is_found():
    assert misquoted(["%0 a", "%1 c"], ["%0 a", "%1 b"]) == "%1 c"
    assert misquoted(["%1 b", "%0 a"], ["%0 a", "%1 b"]) == "%0 a"


def test_a_drawing_follows_the_waits_of_its_program():
    module = load(PAGES / "drawings" / "step_as_a_program.py")
    ops = module.read_program(module.PROGRAM.read_text())
    for before, step in zip([None, *module.schedule(ops)], module.schedule(ops), strict=False):
        for op, (begin, _) in zip(ops, step, strict=True):
            for of_last_step, index in op.waits:
                if before or not of_last_step:
                    assert (before if of_last_step else step)[index][1] <= begin
    with pytest.raises(ValueError, match="cannot read the line"):
        module.read_program("% nonsense")


def test_the_drawing_of_losses_has_a_curve_for_each_training_in_each_panel(tmp_path):
    sys.path.append(str(PAGES / "drawings"))
    module = load(PAGES / "drawings" / "outer_losses.py")
    rows = [
        {
            "case": f"losses, link, 3M: {scheme}",
            "setting": "20 steps",
            "curve": [[0, 5.5, 0, 0], [10, 4.0, 5, sent], [20, loss, 9, 2 * sent]],
        }
        for scheme, loss, sent in (("DDP", 3.0, 8e7), ("DiLoCo, every 16", 3.1, 5e5))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module.draw(tmp_path / "rows.jsonl").write(tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert drawn.count('stroke-width="2"') == 2 * 3 + 2  # the last two are in the legend
    assert "DiLoCo, every 16" in drawn and "3M parameters: 20 steps" in drawn


def test_the_drawing_of_losses_is_that_of_the_recorded_trainings(tmp_path):
    sys.path.append(str(PAGES / "drawings"))
    load(PAGES / "drawings" / "outer_losses.py").draw().write(tmp_path / "drawn.svg")
    again = "draw it again: python3 docs/drawings/outer_losses.py"
    assert (tmp_path / "drawn.svg").read_text() == (PAGES / "drawings" / "outer-losses.svg").read_text(), again
