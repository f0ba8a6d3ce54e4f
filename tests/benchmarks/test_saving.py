"""Tests of the lines that compare saves. They need no torch."""

import pytest
import saving


def test_a_line_compares_the_rounds_of_a_measure():
    ours = {measure: [0.1, 0.3, 0.2] for measure in saving.MEASURES}
    theirs = {measure: [0.2, 0.3, 0.8] for measure in saving.MEASURES}
    rows = saving.rows_of({saving.OURS: ours, saving.THEIRS: theirs})
    assert [row["case"] for row in rows] == list(saving.MEASURES.values())
    assert (rows[0]["value"], rows[0]["against_value"], rows[0]["ratio"]) == pytest.approx((200, 300, 2))
