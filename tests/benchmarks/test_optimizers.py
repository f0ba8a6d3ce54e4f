"""Tests of the optimizers suite: which runs are made and in which order, the statistics, the table and the lines."""

import math
from pathlib import Path

import contest
import optimizers
import pytest
from contest import SEEDS, Case, Finished
from optimizers import BALLAST_ADAMW, BALLAST_MUON, CONTEST, TORCH_MUON

LOSSES = {TORCH_MUON: [2.0, 2.1, 2.2], BALLAST_MUON: [2.01, 2.12, 2.23], BALLAST_ADAMW: [2.5, 2.6, 2.7]}


def row(case: Case, curve: list[list[float]], setting: str = "20 steps") -> dict:
    return {**CONTEST.row_of(case), "setting": setting, "curve": curve, "loss": curve[-1][1]}


def finished(losses: dict[str, list[float]]) -> Finished:
    """Return runs whose curves fall by one from step 10 to step 20."""
    cases = {Case(name, seed): loss for name, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)}
    return {case: row(case, [[10, loss + 1], [20, loss]]) for case, loss in cases.items()}


def line_of(optimizer: str, losses: dict[str, list[float]]) -> list[str]:
    """Return the cells of a line of the table."""
    (line,) = (line for line in CONTEST.markdown(finished(losses)).splitlines() if line.startswith(f"| {optimizer} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_seed_of_all_optimizers_comes_before_the_next():
    cases, names = CONTEST.cases, CONTEST.contenders
    assert [case.seed for case in cases] == [seed for seed in SEEDS for _ in names]
    assert [case.contender for case in cases] == list(names) * len(SEEDS)
    assert len({case.name for case in cases}) == len(cases)


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    assert CONTEST.read(path) == {}
    recorded = finished(LOSSES)
    for each in recorded.values():
        contest.append(path, each)
    assert CONTEST.read(path) == recorded


def test_the_table_has_the_seeds_and_their_statistics():
    assert line_of(TORCH_MUON, LOSSES) == ["2.0000", "2.1000", "2.2000", "2.1000", "0.2000", "", ""]
    assert line_of(BALLAST_MUON, LOSSES)[3:] == ["2.1200", "0.2200", "+0.0200 ± 0.0248", "no"]
    assert line_of(BALLAST_ADAMW, LOSSES)[3:] == ["2.6000", "0.2000", "+0.5000 ± 0.0000", "yes, worse"]


def test_an_unfinished_optimizer_has_its_seeds_alone():
    losses = {**LOSSES, BALLAST_MUON: [2.0, 2.1]}
    assert line_of(BALLAST_MUON, losses) == ["2.0000", "2.1000", "unfinished", "", "", "", ""]
    cases = [line["case"] for line in CONTEST.records(finished(losses))]
    assert cases == [f"{each}{what}" for each in (TORCH_MUON, BALLAST_ADAMW) for what in ("", ", spread of seeds")]


def test_without_the_whole_reference_nothing_is_compared():
    losses = {TORCH_MUON: [2.0], BALLAST_ADAMW: [2.5, 2.6, 2.7]}
    assert line_of(BALLAST_ADAMW, losses)[3:] == ["2.6000", "0.2000", "", ""]
    mean, spread = CONTEST.records(finished(losses))
    assert (mean["against"], mean["ratio"], spread["value"]) == ("", None, pytest.approx(0.2))


def test_lines_have_the_means_the_spreads_and_the_largest_gap():
    lines = {line["case"]: line for line in CONTEST.records(finished(LOSSES)) + optimizers.records_of_curves(finished(LOSSES))}
    assert len(lines) == 2 * len(CONTEST.contenders) + 1
    adamw = lines[BALLAST_ADAMW]
    assert (adamw["against"], adamw["unit"]) == (TORCH_MUON, "loss")
    assert (adamw["value"], adamw["against_value"], adamw["ratio"]) == pytest.approx((2.6, 2.1, 2.1 / 2.6))
    assert lines[f"{BALLAST_MUON}, spread of seeds"]["value"] == pytest.approx(0.22)
    assert lines["Muon, difference of curves"]["value"] == pytest.approx(0.03)


def test_the_largest_gap_is_between_equal_steps_and_seeds():
    runs_of_both = {
        Case(TORCH_MUON, 0): row(Case(TORCH_MUON, 0), [[10, 3.0], [20, 2.0]]),
        Case(BALLAST_MUON, 0): row(Case(BALLAST_MUON, 0), [[10, 3.1], [20, 2.0]]),
        Case(TORCH_MUON, 1): row(Case(TORCH_MUON, 1), [[10, 4.0], [20, 2.5]]),
        Case(BALLAST_MUON, 1): row(Case(BALLAST_MUON, 1), [[10, 4.0], [20, 2.3]]),
        Case(TORCH_MUON, 2): row(Case(TORCH_MUON, 2), [[10, 9.0], [20, 9.0]]),
    }
    assert optimizers.largest_gap(runs_of_both) == pytest.approx(0.2)
    runs_of_both[Case(BALLAST_MUON, 0)]["curve"][1][1] = math.nan
    gap = optimizers.largest_gap(runs_of_both)
    assert gap is not None and math.isnan(gap)
    assert optimizers.largest_gap(finished({BALLAST_MUON: [1.0], BALLAST_ADAMW: [1.0]})) is None
