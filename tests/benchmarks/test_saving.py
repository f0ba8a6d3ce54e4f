"""Tests of the lines that compare saves. They need the built package."""

from importlib.util import find_spec

import pytest
from python.conftest import BUILT

if not BUILT or find_spec("torch") is None:
    pytest.skip("the Python package is not built, or torch is missing", allow_module_level=True)

import saving  # noqa: E402 (needs both)


def test_a_line_compares_the_rounds_of_a_measure():
    ours = {measure: [0.1, 0.3, 0.2] for measure in saving.MEASURES}
    theirs = {measure: [0.2, 0.3, 0.8] for measure in saving.MEASURES}
    rows = saving.rows_of({saving.OURS: ours, saving.THEIRS: theirs})
    assert [row["case"] for row in rows] == list(saving.MEASURES.values())
    assert (rows[0]["value"], rows[0]["against_value"], rows[0]["ratio"]) == pytest.approx((200, 300, 2))
