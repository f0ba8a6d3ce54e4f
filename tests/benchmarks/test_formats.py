"""Tests of the formats suite: which runs are made and in which order, the file of runs, the statistics and the table."""

import itertools
import json
import math
from pathlib import Path

import contest
import formats
import pytest
from contest import SEEDS
from formats import CASES, FINE_TUNING, FIRST, REFERENCE, START, TASKS, TRAINING, VARIANTS, Case, Variant

COMPACT, FOUR_BITS = FIRST[1:]


def row(case: Case, loss: float = 2.0, setting: str = "20 steps") -> dict:
    return {
        "task": case.task.name,
        "state": case.variant.state,
        "gradients": case.variant.gradients,
        "seed": case.seed,
        "setting": setting,
        "curve": [(10, loss + 1), (20, loss)],
        "loss": loss,
        "seconds": 1.0,
        "machine": "a processor, 2 cores",
        "commit": "0",
        "command": "./run-benchmarks formats",
    }


def finished(losses: dict[Variant, list[float]]) -> formats.Finished:
    return {
        Case(TRAINING, variant, seed): row(Case(TRAINING, variant, seed), loss)
        for variant, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    }


def results(losses: dict[Variant, list[float]]) -> dict[Variant, contest.Result]:
    return {result.contender: result for result in formats.results_of(TRAINING, finished(losses))}


def line_of(variant: Variant, losses: dict[Variant, list[float]]) -> list[str]:
    """Return the cells of a line of the table."""
    table = formats.markdown(list(results(losses).values()))
    (line,) = (line for line in table.splitlines() if f"`{variant.state}` | `{variant.gradients}`" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_each_variant_is_trained_and_fine_tuned_with_each_seed():
    assert set(CASES) == {Case(*each) for each in itertools.product(TASKS, VARIANTS, SEEDS)}
    assert len(set(CASES)) == len(CASES) == len({case.name for case in CASES})


def test_the_first_runs_compare_each_moment_format_with_one_seed():
    assert CASES[: len(FIRST)] == tuple(Case(TRAINING, variant, 0) for variant in FIRST)
    assert CASES[0] == START


def test_fine_tuning_comes_after_the_training_it_begins_with():
    assert min(number for number, case in enumerate(CASES) if case.task == FINE_TUNING) > CASES.index(START)


def test_a_recorded_run_is_not_repeated(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    assert formats.read(path) == {}
    for number, case in enumerate(CASES[:4]):
        assert formats.remaining(CASES[:4], formats.read(path), has_start=False) == list(CASES[number:4])
        contest.append(path, row(case))
    assert formats.remaining(CASES[:4], formats.read(path), has_start=False) == []


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    case = Case(FINE_TUNING, FOUR_BITS, 2)
    contest.append(path, row(CASES[0]))
    contest.append(path, row(case, 1.25))
    assert list(formats.read(path)) == [CASES[0], case]
    assert formats.read(path)[case] == json.loads(json.dumps(row(case, 1.25)))


def test_a_lost_start_is_trained_again_for_fine_tuning_alone():
    tuned = Case(FINE_TUNING, COMPACT, 1)
    assert formats.remaining([tuned], {START}, has_start=True) == [tuned]
    assert formats.remaining([tuned], {START}, has_start=False) == [START, tuned]
    assert formats.remaining([START, tuned], set(), has_start=False) == [START, tuned]
    assert formats.remaining([START, tuned], {START, tuned}, has_start=False) == []
    assert formats.remaining([Case(TRAINING, COMPACT, 0)], {START}, has_start=False) == [Case(TRAINING, COMPACT, 0)]


def test_runs_of_another_setting_are_refused():
    contest.refuse_other_settings("formats", {START: row(START)}, lambda case: {"training": "20 steps"}[case.task.name])
    with pytest.raises(SystemExit, match="state fp32, gradients fp32, seed 0 has '20 steps', not '40 steps'"):
        contest.refuse_other_settings("formats", {START: row(START)}, lambda case: {"training": "40 steps"}[case.task.name])


def test_differences_are_those_of_equal_seeds():
    found = results({REFERENCE: [1.0, 2.0, 3.0], COMPACT: [1.1, 2.1, 3.1]})[COMPACT].difference
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
    found = results({REFERENCE: [1.0, 2.0, 3.0], FOUR_BITS: [1.0, math.nan, 3.0]})[FOUR_BITS].difference
    assert found is not None and found.finding == "diverges"


def test_the_table_has_the_statistics_of_finished_variants():
    losses = {REFERENCE: [2.0, 2.1, 2.2], COMPACT: [2.01, 2.12, 2.23]}
    assert line_of(COMPACT, losses)[2:] == ["2.1200", "2.0100 to 2.2300", "+0.0200 ± 0.0248", "no"]
    reference = formats.markdown(list(results(losses).values())).splitlines()[2]
    assert reference == "| `fp32`, `split` | `fp32` | 2.1000 | 2.0000 to 2.2000 |  |  |"


def test_an_unfinished_variant_is_no_result():
    losses = {REFERENCE: [2.0, 2.1, 2.2], COMPACT: [9.0, 9.1]}
    assert line_of(COMPACT, losses)[2:] == ["unfinished: 2 of 3 seeds", "", "", ""]
    assert [line["case"] for line in formats.records(TRAINING, list(results(losses).values()))] == [
        "training, state fp32, gradients fp32"
    ]


def test_without_the_whole_reference_there_is_no_difference():
    losses = {REFERENCE: [2.0, 2.1], COMPACT: [2.0, 2.1, 2.2]}
    assert line_of(COMPACT, losses)[2:] == ["2.1000", "2.0000 to 2.2000", "", ""]
    (line,) = formats.records(TRAINING, list(results(losses).values()))
    assert line["ratio"] is None and line["against"] == ""


def test_a_line_compares_the_means():
    losses = {REFERENCE: [2.0, 2.1, 2.2], COMPACT: [4.0, 4.2, 4.4]}
    line = formats.records(TRAINING, list(results(losses).values()))[1]
    assert line["case"] == "training, state compact, gradients fp32"
    assert (line["value"], line["against_value"], line["ratio"]) == pytest.approx((4.2, 2.1, 0.5))


def test_the_tables_of_a_page_are_replaced():
    old = formats.markdown(list(results({}).values()))
    page = f"# Losses\n\n{old}\nText between.\n\n{old}\nThe end.\n"
    losses = {REFERENCE: [2.0, 2.1, 2.2], COMPACT: [2.01, 2.12, 2.23]}
    new = formats.markdown(list(results(losses).values()))
    renewed = formats.with_tables(page, finished(losses))
    assert renewed == f"# Losses\n\n{new}\nText between.\n\n{old}\nThe end.\n"
    assert formats.with_tables(renewed, finished(losses)) == renewed
    with pytest.raises(ValueError, match="must have 2 tables of losses, not 1"):
        formats.with_tables(page[: page.index("Text")], {})
