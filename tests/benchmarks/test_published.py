"""Tests that the planner's forecasts are near published speeds on GPUs. They need the built package."""

import statistics

import pytest
from python.conftest import BUILT

if not BUILT:
    pytest.skip("the Python package is not built", allow_module_level=True)

import published  # noqa: E402 (needs the package)
from ballast.planning.hardware import GPUS  # noqa: E402

ROWS = published.rows()
EXPLAINED = [row for row in ROWS if not row.not_explained]
MEDIAN, MOST = 0.15, 0.35


@pytest.mark.parametrize("held_out", [False, True])
def test_the_median_error_is_small(held_out):
    errors = [abs(published.error(row)) for row in EXPLAINED if row.held_out is held_out]
    assert len(errors) >= 14
    assert statistics.median(errors) <= MEDIAN


@pytest.mark.parametrize("row", EXPLAINED, ids=lambda row: f"{row.system}, {row.configuration}")
def test_no_forecast_is_far_from_the_figure(row):
    assert abs(published.error(row)) <= MOST


def test_no_row_has_a_factor_of_its_own():
    """Rates of the machine are as published, and for all rows of a source."""
    for row in ROWS:
        assert row.source.startswith("https://github.com/") and row.plan["gpu"] in GPUS
        assert "efficiency" not in row.plan
        same = [other for other in ROWS if (other.source, other.plan["gpu"]) == (row.source, row.plan["gpu"])]
        assert all(other.plan.get(name) == row.plan.get(name) for other in same for name in ("rates", "flops"))


def test_figures_that_are_not_explained_are_few_and_say_why():
    assert len(ROWS) - len(EXPLAINED) <= len(ROWS) // 7


def test_the_page_has_the_tables():
    assert published.table(ROWS) in published.PAGE.read_text(), "run benchmarks/forecasts/published.py --write"
