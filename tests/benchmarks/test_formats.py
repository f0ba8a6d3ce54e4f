"""Tests of contests: which runs are made and in which order, the file of runs, the statistics, the table and the page."""

import itertools
import math
from pathlib import Path

import contest
import pytest
import suite
from contest import SEEDS, Case, Finished
from formats import CONTESTS, PAIRS, START, TASKS, contender

TRAINED, TUNED = CONTESTS
REFERENCE, BF16, COMPACT, FOUR_BITS = TRAINED.contenders[:4]


def finished(losses: dict[str, list[float]]) -> Finished:
    cases = {Case(name, seed): loss for name, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)}
    return {case: {**TRAINED.row_of(case), "setting": "20 steps", "loss": loss} for case, loss in cases.items()}


def result_of(name: str, losses: dict[str, list[float]]) -> contest.Result:
    return next(each for each in TRAINED.results(finished(losses)) if each.contender == name)


def test_each_pair_of_formats_is_trained_and_fine_tuned_with_each_seed():
    cases = [case for each in CONTESTS for case in each.cases]
    wanted = itertools.product(TASKS.values(), PAIRS, SEEDS)
    assert set(cases) == {Case(contender(task, *pair), seed) for task, pair, seed in wanted}
    assert len(set(cases)) == len(cases) == len({case.name for case in cases})
    assert cases[0] == START


def test_one_file_has_the_runs_of_both_tasks(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    assert TRAINED.read(path) == TUNED.read(path) == {}
    for each in CONTESTS:
        contest.append(path, each.row_of(each.cases[1]))
    assert [list(each.read(path)) for each in CONTESTS] == [[each.cases[1]] for each in CONTESTS]


def test_the_lines_of_a_report_are_no_runs(tmp_path: Path):
    path = tmp_path / "record.jsonl"
    contest.append(path, suite.line(REFERENCE, 2.0, "loss"))
    with pytest.raises(SystemExit, match="cannot read runs from .*record.jsonl: it has lines of a report"):
        TRAINED.read(path)


def test_differences_are_those_of_equal_seeds():
    found = result_of(COMPACT, {REFERENCE: [1.0, 2.0, 3.0], COMPACT: [1.1, 2.1, 3.1]}).difference
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.within == pytest.approx(0.0, abs=1e-12)
    assert found.finding == "yes, worse"


def test_the_interval_is_that_of_student_for_three_pairs():
    found = contest.difference_of([0.0, 0.1, 0.2])
    assert found == pytest.approx((0.1, 4.303 * 0.1 / math.sqrt(3)))
    assert found.finding == "no"
    assert contest.difference_of([-0.10, -0.11, -0.12]).finding == "yes, better"


def test_a_loss_that_is_not_finite_is_shown():
    found = result_of(FOUR_BITS, {REFERENCE: [1.0, 2.0, 3.0], FOUR_BITS: [1.0, math.nan, 3.0]}).difference
    assert found is not None and found.finding == "diverges"


def test_the_tables_of_a_page_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page, runs = tmp_path / "page.md", tmp_path / "runs.jsonl"
    page.write_text("# Losses\n<!-- written by ./run-benchmarks formats -->\nold\n<!-- end -->\n<!-- end -->\n")
    losses = {REFERENCE: [2.0, 2.1, 2.2], BF16: [2.01, 2.12, 2.23]}
    for row in finished(losses).values():
        contest.append(runs, row)
    monkeypatch.setattr("sys.argv", ["formats", "--runs", str(runs), "--table", "--renew", str(page)])
    program = contest.Suite(CONTESTS, "", 2000, train=lambda *_: None)
    for _ in range(2):
        program.main()
        text = page.read_text()
        assert text.startswith("# Losses\n<!--") and text.endswith("-->\n<!-- end -->\n") and "old" not in text
        assert text.count(f"| {BF16} | 2.0100 | 2.1200 | 2.2300 | 2.1200 | 0.2200 | +0.0200 ± 0.0248 | no |\n") == 1
        assert text.count(f"| {TUNED.reference} | unfinished |") == 1
    assert len(capsys.readouterr().out.splitlines()) == 2 * 4  # a mean and a spread of each that is finished
